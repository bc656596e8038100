#!/usr/bin/env bash
# The executor's benchmark on one CUDA card, in ten minutes: Qwen3-0.6B and 1.7B shapes,
# bf16, trees shaped like tau2 episodes with paths of 16K tokens, and no sharing at all.
#
#     bash scripts/bench_gpu.sh            # writes bench_out/, or $OUT if that is set
#
# Needs torch, transformers and numpy; downloads nothing. Half of the time is for each
# model: a slow card gets fewer rounds, and a run that is cut short keeps what it has.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${OUT:-bench_out}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Variants differ in the sizes that they allocate: one must not fragment for the next.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

"$python" - <<'PY' || exit 1
import sys

try:
    import torch
except ImportError as error:
    sys.exit(f"bench_gpu.sh: {error}; set PYTHON to one that has torch, transformers "
             "and numpy")

if not torch.cuda.is_available():
    sys.exit("bench_gpu.sh: torch finds no CUDA device; scripts/bench_executor.py "
             "runs on a CPU")
print(torch.cuda.get_device_name(), torch.__version__)
PY

failed=0
for model in qwen3-0.6b qwen3-1.7b; do
  file="$out/bench_$model"
  timeout --foreground 290 "$python" scripts/bench_executor.py \
    --model "$model" --dtype bfloat16 --device cuda \
    --workloads tau2-airline,tau2-telecom-solo,no-sharing \
    --data none --path-tokens 16384 --dense-sample 4 --repeats 3 --max-seconds 80 \
    --variants dense,dense_ckpt,leaf,packed,dfs,dta,dta@4096/0 \
    --json "$file.json" 2> >(tee "$file.log" >&2) | tee "$file.md" || {
      echo "bench_gpu.sh: $model ended early (status $?), see $file.log" >&2
      failed=1
    }
done
exit "$failed"
