"""Which trainer and which engine a configuration means, and what trainers add."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from areal.engine.fsdp_engine import (
    FSDPDPOEngine,
    FSDPLMEngine,
    FSDPPPOActor,
    FSDPPPOCritic,
    FSDPRWEngine,
)
from areal.trainer.dpo_trainer import DPOTrainer
from areal.trainer.rl_trainer import PPOTrainer
from areal.trainer.rw_trainer import RWTrainer
from areal.trainer.sft_trainer import SFTTrainer
from areal.utils.data import cycle_dataloader
from areal.utils.saver import Saver
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from areal_dta.collector.planner import BatchPlanner
from areal_dta.config.composed import ConfigError
from areal_dta.config.resolved import KIND_OF
from areal_dta.config.schema import ALGORITHMS, to_structured
from areal_dta.engine import KINDS, engine_class
from areal_dta.engine.dense_engines import DenseEngine
from areal_dta.engine.dta_engine import DTAEngine
from areal_dta.schedule import TRAINING, BlockFeatures, BlockSample, FlopModel
from areal_dta.startup.compose import compose, find_config
from areal_dta.startup.train_process import trainer_class
from areal_dta.trainers.ppo import DTATrainer
from areal_dta.trainers.step_record import StepRecorder
from areal_dta.trainers.supervised import BatchLoader
from areal_dta.trainers.watched import WatchedTrainer

AREAL_TRAINERS = {
    "ppo": PPOTrainer,
    "sft": SFTTrainer,
    "dpo": DPOTrainer,
    "rw": RWTrainer,
}
AREAL_ENGINES = {
    "actor": FSDPPPOActor,
    "critic": FSDPPPOCritic,
    "lm": FSDPLMEngine,
    "dpo": FSDPDPOEngine,
    "rw": FSDPRWEngine,
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trainers_are_areal_s_with_ours_in_front(algorithm: str) -> None:
    cls = trainer_class(algorithm)
    assert issubclass(cls, WatchedTrainer)
    assert issubclass(cls, AREAL_TRAINERS[algorithm])
    assert cls.mro().index(WatchedTrainer) < cls.mro().index(AREAL_TRAINERS[algorithm])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_call_that_is_measured_is_the_controller_s(algorithm: str) -> None:
    config = first_section(algorithm)
    config.backend = "fsdp:d1"
    engine = AREAL_ENGINES[KIND_OF[algorithm]]
    controller = engine.as_controller(config, None)
    assert callable(getattr(controller, trainer_class(algorithm).batch_call))


def first_section(algorithm: str) -> Any:
    name = "gsm8k_grpo" if algorithm == "ppo" else f"gsm8k_{algorithm}"
    return to_structured(compose(find_config(name), ["hardware=cpu"])).actor


@pytest.mark.parametrize("kind", KINDS)
def test_engines(kind: str) -> None:
    tree = engine_class(kind, "dta", "sdpa")
    assert issubclass(tree, DTAEngine) and issubclass(tree, AREAL_ENGINES[kind])
    for attention in ("sdpa", "eager"):
        dense = engine_class(kind, "fsdp", attention)
        assert issubclass(dense, DenseEngine)
        assert issubclass(dense, AREAL_ENGINES[kind])
    assert engine_class(kind, "megatron", "sdpa") is None
    # AReaL's own suffices with flash attention, except that its reward models fail and
    # that it deals prompts in multiples of the ranks
    with_flash = engine_class(kind, "fsdp", "flash_attention_2")
    assert (with_flash is None) is (kind in ("lm", "dpo"))


class Controllers:
    """Stands for an engine class: remembers what it was asked for."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def as_controller(self, config: Any, scheduler: Any) -> Any:
        self.made.append((config, scheduler))
        return SimpleNamespace(create_process_group=self._create)

    def _create(self, parallel_strategy: Any) -> None:
        self.made.append(parallel_strategy)


def test_the_trainer_makes_them_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, str]] = []
    controllers = Controllers()

    def choose(kind: str, engine: str, attn_impl: str) -> Any:
        asked.append((kind, engine, attn_impl))
        return controllers

    monkeypatch.setattr("areal_dta.trainers.watched.engine_class", choose)
    trainer: Any = DTATrainer.__new__(DTATrainer)
    trainer.scheduler = "the scheduler"
    alloc: Any = SimpleNamespace(backend="fsdp", parallel="d2")
    section: Any = SimpleNamespace(engine="dta", attn_impl="sdpa")
    trainer._create_train_engine(section, alloc)
    trainer._create_critic(section, alloc)
    assert asked == [("actor", "dta", "sdpa"), ("critic", "dta", "sdpa")]
    assert controllers.made == [(section, "the scheduler"), "d2"] * 2


def test_statistics_of_the_critic_are_committed_with_the_actor_s() -> None:
    logged: list[Any] = []
    records: list[Any] = []
    logger = SimpleNamespace(commit=lambda *args: logged.append(args))
    trainer: Any = DTATrainer.__new__(DTATrainer)
    exported = {"ppo_critic/grad_norm": 1.0, "dta/sharing_ratio": 2.0}
    trainer.critic = SimpleNamespace(_custom_function_call=lambda name: exported)
    recorder = StepRecorder(on_step=records.append)
    with recorder.step(3, logger, trainer.more_stats):
        logger.commit(0, 1, 2, {"sft/grad_norm": 3.0})
    expected = {
        "sft/grad_norm": 3.0,
        "ppo_critic/grad_norm": 1.0,
        "critic/dta/sharing_ratio": 2.0,
    }
    assert logged == [(0, 1, 2, [expected])]
    assert [(record.step, record.grad_norm) for record in records] == [(3, 3.0)]
    trainer.critic = None
    assert trainer.more_stats() == {}


@pytest.mark.parametrize("method", ["prepare_batch", "train_lm"])
def test_batches_are_measured_on_their_way(method: str) -> None:
    """Whether the controller returns them or takes them."""
    measured: list[Any] = []
    meter: Any = SimpleNamespace(measure=measured.append)

    class Controller:
        def prepare_batch(self, loader: str) -> list[str]:
            return [loader]

        def train_lm(self, batch: str) -> None:
            assert batch in ("batch", "unseen")

    controller = Controller()
    with StepRecorder(meter=meter).watch_batches(controller, method):
        answer = getattr(controller, method)("batch")
    getattr(controller, method)("unseen")
    assert measured == ([["batch"]] if method == "prepare_batch" else ["batch"])
    assert answer == (["batch"] if method == "prepare_batch" else None)


def loader(num_rows: int = 10, drop_last: bool = False) -> StatefulDataLoader[Any]:
    rows: Any = list(range(num_rows))
    sampler: Any = DistributedSampler(rows, 1, 0, shuffle=True)
    return StatefulDataLoader(
        rows, batch_size=4, sampler=sampler, drop_last=drop_last, collate_fn=list
    )


def first_batches(made: Any, num: int) -> list[list[int]]:
    """Return batches as AReaL's supervised trainers take them."""
    batches = cycle_dataloader(made)
    return [next(batches) for _ in range(num)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_data_continue_in_any_epoch(drop_last: bool) -> None:
    """0.1.0 restarted the shuffle at epoch 0."""
    expected = first_batches(loader(drop_last=drop_last), 12)  # AReaL's order
    assert expected[:3] != expected[3:6]
    for num_done in range(12):
        made = BatchLoader(loader(drop_last=drop_last), num_done)
        assert len(made) == (2 if drop_last else 3)
        assert first_batches(made, 12 - num_done) == expected[num_done:]


def test_other_data_are_refused() -> None:
    state = BatchLoader(loader(num_rows=8)).state_dict()
    BatchLoader(loader(num_rows=7)).load_state_dict(state)
    with pytest.raises(ConfigError, match="2 batches per epoch, the data set has 3"):
        BatchLoader(loader(num_rows=9)).load_state_dict(state)
    BatchLoader(loader()).load_state_dict({"_num_yielded": 2})  # of 0.1.0


@pytest.mark.parametrize("has_space", [True, False])
def test_a_full_disk_costs_a_checkpoint(tmp_path: Path, has_space: bool) -> None:
    class Stock:
        def _save_hf(self, epoch: int, epoch_step: int, global_step: int) -> None:
            name = f"epoch{epoch}epochstep{epoch_step}globalstep{global_step}"
            root = Saver.get_model_save_root("e", "t", str(tmp_path))
            (Path(root) / name).mkdir()
            if not has_space:
                raise OSError(errno.ENOSPC, "No space left on device")

    class Trainer(WatchedTrainer, Stock):
        batch_call = "none"

    trainer: Any = Trainer.__new__(Trainer)
    trainer.saver = SimpleNamespace(freq_ctl=SimpleNamespace(check=lambda: True))
    cluster = SimpleNamespace(fileroot=str(tmp_path))
    trainer.config = SimpleNamespace(
        experiment_name="e", trial_name="t", cluster=cluster
    )
    trainer.last_checkpoint = "the one before"
    trainer._save_hf(0, 1, 2)
    root = Path(Saver.get_model_save_root("e", "t", str(tmp_path)))
    made = [str(path) for path in root.iterdir()]
    assert made == ([trainer.last_checkpoint] if has_space else [])
    if not has_space:
        assert trainer.last_checkpoint == "the one before"


def test_measured_blocks_reach_the_planner() -> None:
    features = BlockFeatures(1, 5, 0, 15, 4, 6, 2)
    samples = [BlockSample(features, seconds, TRAINING) for seconds in (0.5, 0.25)]
    planner = BatchPlanner(FlopModel(4e7, 2e4, 1.6e7))
    total = SimpleNamespace(
        num_sequences=1,
        num_sequence_tokens=6,
        num_tree_tokens=6,
        num_pairs=21,
        num_outputs=4,
    )
    hook: Any = SimpleNamespace(
        collector=SimpleNamespace(
            add_seconds=lambda name, seconds: None,
            take_metrics=lambda seconds: {"collector/wait_seconds": 0.0},
            total=total,
        ),
        traffic=SimpleNamespace(take_metrics=dict),
        last_batch=None,
    )
    trainer: Any = SimpleNamespace(
        _since=0.0,
        config=SimpleNamespace(collector=SimpleNamespace(refit_costs=True)),
        _recorder=SimpleNamespace(take_meter_seconds=lambda: 0.0),
        critic=None,
        ref=None,
    )
    for sent in (samples, []):
        actor: Any = SimpleNamespace(
            planner=planner,
            take_block_samples=lambda: [list(s.to_floats()) for s in sent],  # noqa: B023
        )
        stats = DTATrainer._collector_stats(trainer, hook, actor)
        assert stats["plan/measured_blocks"] == 2
        assert stats["plan/executor_seconds"] == sum(s.seconds for s in sent)
