#!/usr/bin/env bash
# Everything to run on the first GPU, in under 25 minutes on an H100 or H200:
#
#     bash scripts/gpu_acceptance.sh                  # writes acceptance/, or $OUT
#     bash scripts/gpu_acceptance.sh --only doctor,tests
#     bash scripts/gpu_acceptance.sh --dry            # the same parts, tiny, on a CPU
#
# Parts: doctor, tests (pytest -m gpu), benchmark, projection, grpo. Each has a time-out
# of its own and leaves its JSON when it is cut short; summary.json says how each ended.
# Ends with 0 if all parts did. Needs torch, transformers and pytest; AReaL for grpo.
# Downloads nothing. PYTHON names the interpreter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${OUT:-acceptance}
python=${PYTHON:-python3}
only=doctor,tests,benchmark,projection,grpo
dry=0
while [[ $# -gt 0 ]]; do
  case $1 in
    --dry) dry=1 ;;
    --only) only=$2; shift ;;
    *) echo "gpu_acceptance.sh: unknown option $1; expected --dry or --only PARTS" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$PWD/scripts:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Variants differ in the sizes that they allocate: one must not fragment for the next.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

if [[ $dry == 0 ]]; then
  "$python" -c '
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"gpu_acceptance.sh: {error}; set PYTHON to an interpreter that has it")
if not torch.cuda.is_available():
    sys.exit("gpu_acceptance.sh: torch finds no CUDA device; --dry runs on a CPU")
print(torch.cuda.get_device_name(), torch.__version__)' || exit 1
fi

parts=()
failed=0

# part NAME SECONDS COMMAND...: runs it if it is wanted; keeps its log and how it ended.
part() {
  local name=$1 limit=$2
  shift 2
  [[ $dry == 0 ]] || limit=$((4 * limit)) # a CPU that others use, too
  [[ ",$only," == *",${name%%:*},"* ]] || return 0
  local log="$out/${name/:/-}.log" start=$SECONDS status=0
  echo "== $name (at most $limit s, log in $log)"
  timeout --kill-after=20 "$limit" "$@" 2>&1 | tee "$log" || status=${PIPESTATUS[0]}
  [[ $status == 0 ]] || failed=1
  parts+=("{\"part\": \"$name\", \"status\": $status, \"timed_out\": $([[ $status == 124 || $status == 137 ]] && echo true || echo false), \"seconds\": $((SECONDS - start))}")
  summary
}

summary() {
  local joined
  joined=$(IFS=,; echo "${parts[*]}")
  echo "{\"dry\": $([[ $dry == 1 ]] && echo true || echo false), \"parts\": [$joined]}" >"$out/summary.json"
}

# What each part runs: tiny on a CPU for the script's own test, in full on a GPU.
if [[ $dry == 1 ]]; then
  doctor=(--device cpu --seconds 2)
  tests=(tests/executor/test_on_gpu.py -m gpu)
  models=(tiny)
  bench=(--device cpu --dtype float32 --workloads tau2-airline,no-sharing --path-tokens 120
    --max-sequences 6 --repeats 1 --variants dense_packed,dta_auto)
  projection=(--models 0.6b --blocks 4096 --path-tokens 600 --layers 3)
  grpo=(hardware=cpu total_train_steps=2 train_dataset.batch_size=2 gconfig.n_samples=2)
else
  doctor=(--device cuda --seconds 60)
  tests=(tests -m gpu)
  models=(qwen3-0.6b qwen3-1.7b qwen3-8b)
  bench=(--device cuda --dtype bfloat16 --workloads tau2-airline,tau2-telecom-solo,no-sharing
    --path-tokens 16384 --repeats 3 --max-seconds 60
    --variants dense_packed,dta_auto,dta@4096/0)
  projection=(--models 0.6b,1.7b,8b --blocks 4096)
  grpo=(hardware=gpu total_train_steps=3)
fi

part doctor 150 "$python" -m areal_dta.doctor "${doctor[@]}" --json "$out/doctor.json"
part tests 300 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" \
  --junitxml "$out/tests.xml"
for model in "${models[@]}"; do
  part "benchmark:$model" 180 "$python" scripts/bench_executor.py --model "$model" \
    --data none --baseline dense_packed "${bench[@]}" --json "$out/bench-$model.json"
done
part projection 120 "$python" scripts/project_gpu.py "${projection[@]}" \
  --card auto --json "$out/projection.json"

# Three steps of a whole run, where AReaL is installed: rollouts by SGLang, vLLM or the
# embedded server, whichever hardware=gpu finds.
if "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("areal") is None)'; then
  part grpo 300 "$python" -m areal_dta.launch --config gsm8k_grpo.yaml "${grpo[@]}" \
    cluster.fileroot="$out/grpo"
  cp "$(find "$out/grpo" -name metrics.jsonl 2>/dev/null | head -n 1)" \
    "$out/grpo.jsonl" 2>/dev/null || true
else
  echo "== grpo is left out: AReaL is not installed"
fi

echo "== $out/summary.json"
summary
cat "$out/summary.json"
exit "$failed"
