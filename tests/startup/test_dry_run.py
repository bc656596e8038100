"""What a run would do, and the launcher's command line, without starting anything."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from areal_dta import launch
from areal_dta.config.schema import DTAGRPOConfig
from areal_dta.embedded import tiny_model_path
from areal_dta.processes.run_lock import locked
from areal_dta.report.batch_sharing import BatchMeter, model_flops
from areal_dta.startup.compose import project_config_dir, run_dir
from areal_dta.startup.dry_run import minimum_sharing, num_parameters
from areal_dta.startup.prepare import prepare
from tests.end_to_end.running import run_launcher

CONFIGS = project_config_dir()
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))
# Those of recipes have data sets, and tests, of their own.
EXPERIMENTS = sorted(
    path.name
    for path in CONFIGS.glob("*.yaml")
    if "recipes." not in path.read_text() and not path.name.startswith("tau2_")
)


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE"):
        # what `prepare` sets for this process must not outlive the test
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            monkeypatch.delenv(name)
    return tmp_path


def dry_run(capfd: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = launch.main([*args, "--dry-run"])
    out, err = capfd.readouterr()
    return code, out, err


class TestDryRun:
    @pytest.mark.parametrize(
        ("name", "model"),
        [(name, "tiny") for name in EXPERIMENTS]
        + [("gsm8k_grpo.yaml", model) for model in MODELS],
    )
    def test_every_yaml(
        self, capfd: pytest.CaptureFixture[str], cwd: Path, name: str, model: str
    ) -> None:
        # The tiny model stands in for those that would have to be downloaded.
        code, out, err = dry_run(
            capfd,
            *("--config", name, "hardware=cpu", f"model={model}"),
            f"actor.path={tiny_model_path()}",
            "train_dataset.dataset_kwargs={num_problems: 64}",
        )
        assert (code, err) == (0, "")
        config, plan = out.split("\nplan\n")
        assert "experiment_name:" in config
        titles = ["training", "model", "data", "steps", "sharing"]
        if "\nalgorithm: " not in config:
            titles.append("rollouts")
        for title in titles:
            assert f"\n  {title} " in f"\n{plan}"
        rows = r"64 (prompts|examples|pairs)"
        assert re.search(rows, plan)
        assert str(cwd / "outputs") in plan
        assert list(cwd.iterdir()) == []  # nothing was started, nothing written

    def test_overrides_show(self, capfd: pytest.CaptureFixture[str]) -> None:
        _, out, _ = dry_run(
            capfd,
            *("--config", "gsm8k_grpo.yaml", "hardware=auto", "seed=17"),
            *("actor.backend=fsdp:d2", "total_train_steps=3"),
        )
        assert "\nseed: 17\n" in out
        assert "norms and minibatches) on 2 processes" in out
        assert "  steps     3 of 16 prompts x 8 samples, at most 48 new tokens" in out
        assert "0.85 M parameters, float32" in out
        assert "hardware=auto: torch" in out

    def test_models_beside_the_actor(self, capfd: pytest.CaptureFixture[str]) -> None:
        _, out, _ = dry_run(
            capfd,
            *("--config", "gsm8k_ppo.yaml", "hardware=cpu", "critic.backend=fsdp:d2"),
        )
        twin = "dense twin (fsdp: AReaL's engine, our dispatch, norms and minibatches)"
        assert f"  critic    {twin} on 2 processes\n" in out
        assert "  ref       prefix-tree engine (dta) on 1 process" in out

    def test_the_sharing_of_pairs_is_measured(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        _, out, _ = dry_run(capfd, "--config", "gsm8k_rw.yaml", "hardware=cpu")
        ratio = re.search(r"sharing +([\d.]+) sequence tokens per tree token", out)
        assert ratio and float(ratio[1]) > 2.0

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("actor.bakend=dta:d1", "did you mean 'actor.backend'"),
            ("actor.backend=dta2:d1", "unknown backend 'dta2'"),
            ("train_dataset.batch_size=4096", "fewer than one batch"),
            ("train_dataset.path=openai/gsm9k", "train_dataset: "),
            ("train_dataset.dataset_kwargs={nr: 1}", "train_dataset: .*'nr'"),
        ],
    )
    def test_errors(
        self, capfd: pytest.CaptureFixture[str], override: str, message: str
    ) -> None:
        code, out, err = dry_run(
            capfd, "--config", "gsm8k_grpo.yaml", "hardware=cpu", override
        )
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("areal_dta: ")
        assert re.search(message, line), line


class TestCommandLine:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ([], "areal_dta: the following arguments are required: --config"),
            (["--config", "gsm8k_gpro.yaml"], "did you mean 'gsm8k_grpo.yaml'"),
            (["--config", "gsm8k_grpo.yaml", "--dryrun"], "unrecognized arguments"),
            (["--config", "gsm8k_grpo.yaml", "model=tny"], "did you mean 'tiny'"),
        ],
    )
    def test_light_errors(
        self, capfd: pytest.CaptureFixture[str], args: list[str], message: str
    ) -> None:
        assert launch.main(args) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert message in err
        assert len(err.splitlines()) == 1

    def test_an_error_that_only_the_job_can_find(self, cwd: Path) -> None:
        result = run_launcher(
            *("--config", "gsm8k_grpo.yaml", "actor.dta.block_token=8"), cwd=cwd
        )
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line == (
            "areal_dta: unknown key 'actor.dta.block_token' "
            "(did you mean 'actor.dta.block_tokens'?)"
        )
        assert "Traceback" not in result.stdout

    def test_two_runs_in_one_directory(
        self, cwd: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        directory = cwd / "outputs" / "gsm8k-grpo" / "trial0"
        with locked(directory):
            assert launch.main(["--config", "gsm8k_grpo.yaml"]) == 2
        assert "another run is using" in capfd.readouterr().err
        with locked(directory):
            pass  # free again


class TestSharing:
    def config(self, samples: int, new_tokens: int, batch: int) -> DTAGRPOConfig:
        config = prepare(
            "gsm8k_grpo.yaml",
            [
                "hardware=cpu",
                f"gconfig.n_samples={samples}",
                f"gconfig.max_new_tokens={new_tokens}",
                f"train_dataset.batch_size={batch}",
            ],
        ).config
        assert isinstance(config, DTAGRPOConfig)
        return config

    def test_lower_bound_by_hand(self) -> None:
        # Two prompts of 6 and 4 tokens, 3 answers of 5 tokens each:
        # 3 * (6 + 5) + 3 * (4 + 5) = 60 sequence tokens in 6 + 4 + 6 * 5 = 40 of trees.
        prompts = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
        least = minimum_sharing(self.config(3, 5, 2), prompts)
        assert least.sharing_ratio == pytest.approx(60 / 40)
        assert least.predicted_saving is not None
        assert 0 < least.predicted_saving < 1

    def test_nothing_shared_saves_nothing(self) -> None:
        least = minimum_sharing(self.config(1, 500, 2), [[1, 2], [3, 4]])
        assert least.sharing_ratio == 1.0
        # Only the logits of each sequence's last position, which has no label.
        assert least.predicted_saving == pytest.approx(0.0, abs=2 / 500)

    def test_batch_shape_by_hand(self) -> None:
        meter = BatchMeter(model_flops(tiny_model_path()), 512, None)
        sequences = [np.array(s) for s in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 5])]
        shape = meter.measure_sequences(sequences, [1.0, 0.0, 0.5])
        assert (shape.num_sequences, shape.sequence_tokens, shape.tree_tokens) == (
            3,
            10,
            5,
        )
        assert shape.sharing_ratio == 2.0
        assert shape.reward == 0.5
        assert shape.predicted_saving is not None and shape.predicted_saving > 0.4

    def test_without_a_flop_model(self) -> None:
        shape = BatchMeter(None, 512, None).measure_sequences([np.array([1, 2])])
        assert shape.predicted_saving is None
        assert shape.reward is None


def test_parameters_are_counted_from_the_checkpoint(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "m.safetensors")
    assert num_parameters(str(tmp_path)) == 17
    assert num_parameters("a/hub-name") is None


def test_run_dir_is_absolute(cwd: Path) -> None:
    run = prepare("gsm8k_grpo.yaml", ["hardware=cpu", "trial_name=t7"])
    assert run_dir(run.composed) == cwd / "outputs" / "gsm8k-grpo" / "t7"
    assert run.config.saver.fileroot == str(cwd / "outputs")
