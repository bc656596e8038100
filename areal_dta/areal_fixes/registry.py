"""Repairs of AReaL, FSDP2, Ray and litellm: what, why, until when.

One record per repair, without importing what it repairs, so that the start-up can
compare versions first. `docs/repairs.md` is made of these records and of the docstrings
of what they name. tests/areal_fixes/test_faults*.py hold a test per record that shows
the fault without the repair: when it fails, upstream has mended it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from packaging.specifiers import SpecifierSet

from areal_dta.config.composed import ConfigError

if TYPE_CHECKING:
    from areal_dta.config.resolved import ResolvedRun


@dataclass(frozen=True, slots=True)
class Repair:
    """One fault of a dependency, and where it is repaired."""

    name: str
    """Module below `areal_dta.areal_fixes`, and the function or class in it."""
    fault: str
    until: str
    """What upstream has to change before the repair can go."""
    undo: str = "AReaL's own class stays as it is"
    package: str = "areal"
    versions: str = "==1.0.4"
    """Versions for which it was made; empty if it finds out whether it is needed."""

    def check_version(self) -> None:
        """Compare the installed version.

        Raises:
            ConfigError: another version is installed than those it was made for.
        """
        found = version(self.package)
        if not SpecifierSet(self.versions).contains(found, prereleases=True):
            raise ConfigError(
                f"areal_fixes.{self.name} repairs {self.package} {self.versions}, "
                f"found {found}; install {self.package}{self.versions}"
            )


_LEAVE: Final = "leave the context"
_CALL: Final = "call what it returns"
_PROCESS: Final = "none: of the agent proxy's process alone"

REPAIRS: Final = (
    Repair(
        "checkpoint_slots.slots_for_recovery",
        "A recover checkpoint is overwritten in place: a run that is killed meanwhile "
        "leaves neither the old state nor the new. One that cannot be read is ignored, "
        "and the run starts from step 0. The critic is saved and not restored.",
        "recover checkpoints are replaced atomically, verified, and restored whole",
        _LEAVE,
    ),
    Repair(
        "training_engines.RecoverableEngine",
        "A checkpoint lacks the LR schedule and the random generators; and a failure "
        "to save or load is no `Exception`, so that a worker never answers the call.",
        "`FSDPEngine` saves them, and raises an `Exception`",
    ),
    Repair(
        "trainer_steps.saved_together",
        "Actor and critic ask in turn whether it is time to save, and each question "
        "counts as a step: they are saved in different steps.",
        "`PPOTrainer._save_hf` asks once per step",
        _LEAVE,
    ),
    Repair(
        "trainer_steps.critic_stats",
        "The statistics of the critic are never exported.",
        "`PPOTrainer._export_and_commit_stats` includes the critic",
        "none: only reads",
    ),
    Repair(
        "trainer_steps.teacher_cleared",
        "What a teacher fetched of a batch stays in its memory for ever.",
        "`PPOTrainer.train` clears the teacher's batches",
        _LEAVE,
    ),
    Repair(
        "trainer_steps.free_results",
        "The tensors of evaluation rollouts stay on their workers for ever: nobody "
        "uses or clears them.",
        "`PPOTrainer._evaluate_fn` clears what it waited for",
        "delete the controller's own `wait`",
    ),
    Repair(
        "trainer_steps.staleness_control_at_controller",
        "Each rollout worker has a staleness control of its own, which counts what the "
        "controller gave up (rejected, too late, not to be fetched) as trained on: its "
        "capacity shrinks for good, and in the end the run stands still.",
        "workers in single-controller mode have no staleness control",
        _LEAVE,
    ),
    Repair(
        "trainer_steps.with_secret_key",
        "The agent proxy's default key is public, and the same for every run.",
        "a random default of `AgentConfig.admin_api_key`",
        "set rollout.agent.admin_api_key",
    ),
    Repair(
        "trainer_steps.start_name_service",
        "The Ray scheduler does not set up the name service: workers elsewhere look "
        "into another one, and entries of an earlier run remain.",
        "`RayScheduler` does what `LocalScheduler` does",
        "none: the next trainer sets it up anew",
    ),
    Repair(
        "local_scheduler.BoundedLocalScheduler",
        "The local scheduler waits for ever for a worker that died while it started, "
        "and only 60 s for a forked one, leaves the log out of the error, and draws "
        "ports from the generator that the trainer seeds.",
        "`LocalScheduler` watches its processes; its ports do not follow the seed",
    ),
    Repair(
        "slurm_scheduler.BoundedSlurmScheduler",
        "The Slurm scheduler ignores the specification's container type, mounts and "
        "srun arguments, hands its environment variables to containers alone, divides "
        "by zero GPUs per node, waits for ever for a worker that does not answer, and "
        "does not notice that a job reached its time limit.",
        "`SlurmScheduler` heeds `SchedulingSpec`, and its waits end",
    ),
    Repair(
        "loopback.use_loopback",
        "Workers, callback server and rollout servers listen on the machine's outward "
        "address without authentication; their RPC calls what it is told to.",
        "AReaL has a setting for the address",
        _CALL,
    ),
    Repair(
        "loopback.bypass_proxies",
        "Where environment variables name a proxy for everything, calls to workers and "
        "servers on loopback go to the proxy, which cannot reach them, or answers in "
        "their place.",
        "AReaL's clients call loopback without a proxy",
        "reset `no_proxy` and `NO_PROXY`",
    ),
    Repair(
        "loopback.ray_on_loopback",
        "A Ray that is started on one machine listens on its outward address.",
        "`ray.init` takes the address for a node of its own",
        _CALL,
        "ray",
        ">=2.9,<3",  # monthly releases; the switch has been the same for years
    ),
    Repair(
        "rollout_workers.load_when_saved",
        "Rollout workers look once per second whether new weights are saved, and "
        "nearly always just before they are.",
        "a saved checkpoint is announced to waiting workers",
        "delete the controller's own `update_weights_from_disk`",
    ),
    Repair(
        "rollout_workers.PromptlyResumed",
        "A request that a weight update interrupts sleeps for half a second before it "
        "looks whether it may go on: newer ones overtake it, and the batch that the "
        "trainer waits for comes last.",
        "requests wait for the event of being resumed",
    ),
    Repair(
        "rollout_workers.keep_connections",
        "Each generation request opens a connection of its own.",
        "`get_default_connector` does not force connections to close",
        _CALL,
    ),
    Repair(
        "rollout_workers.remember_versions",
        "Every prompt that is tokenized looks up the installed version of Transformers "
        "on the disk, which takes longer than to tokenize it.",
        "`pkg_version` keeps what it has found",
        _CALL,
    ),
    Repair(
        "training_engines.PairRewards",
        "`train_rw` raises a KeyError: it counts the pairs of a padded batch by "
        "`cu_seqlens`, which only packed batches have; and a pair's two rows are dealt "
        "to different ranks.",
        "`FSDPRWEngine.train_rw` works, and `RWController.train_rw` keeps pairs",
    ),
    Repair(
        "training_engines.keep_lone_payloads",
        "A worker's RPC server broadcasts each value of a payload on its own, also "
        "where no other rank is to get it: a tenth of a small training step.",
        "the RPC servers broadcast only in groups of several ranks",
        _CALL,
    ),
    Repair(
        "training_engines.read_own_results",
        "A worker fetches tensors that it has computed itself, such as advantages, "
        "from itself, over HTTP and as base64 in JSON.",
        "`RTensor.localize` looks into its own storage first",
        _CALL,
    ),
    Repair(
        "group_normalization.ItemNormalization",
        "Rows are sliced by a fixed `group_size`, so that items of other sizes are "
        "mixed; and a rank whose mask is all zero skips the all-reduces, while the "
        "others wait for it.",
        "`Normalization` takes groups of any size, and never skips a collective",
    ),
    Repair(
        "fsdp2.drop_unreduced_gradients",
        "After a failed pass nothing public drops gradients that were not reduced, or "
        "the record of forwards by which FSDP2 prefetches.",
        "FSDP2 modules can be reset",
        "none: called after a failure",
        "torch",
        ">=2.9,<2.11",  # what AReaL allows, and the tests ran on
    ),
    Repair(
        "agent_proxy.alias_litellm",
        "The agent proxy imports a module that litellm 1.108 has renamed; it dies, and "
        "a time-out is reported a minute later.",
        "AReaL imports the new name",
        _PROCESS,
        "litellm",
        "",
    ),
    Repair(
        "agent_proxy.pass_template_kwargs",
        "The agent proxy drops a request's `chat_template_kwargs`, which SGLang and "
        "vLLM take.",
        "the proxy passes them on",
        _PROCESS,
    ),
    Repair(
        "agent_proxy.mark_trajectory_starts",
        "Exported sequences lack `begin_of_trajectory`: an episode of many calls has "
        "its reward counted many times where rewards are normalised.",
        "the proxy exports it",
        _PROCESS,
    ),
    Repair(
        "agent_proxy.accept_empty_replies",
        "A reply of nothing but stop tokens is refused with status 500: its prompt is "
        "dropped, and the habit never trained against.",
        "`ModelResponse.output_tokens_without_stop` may be empty",
        _CALL,
    ),
    Repair(
        "loggers.secrets_redacted",
        "The whole configuration, keys and passwords included, goes to experiment "
        "loggers.",
        "`StatsLogger.init` leaves out what is secret",
        _LEAVE,
    ),
    Repair(
        "loggers.skip_disabled_swanlab",
        "SwanLab is started and given each step's statistics where it is disabled, and "
        "sorts them into charts: a few per cent of the controller's work.",
        "`StatsLogger` does not call loggers that are disabled",
        _CALL,
    ),
    Repair(
        "loggers.task_logger",
        "Python's root logger is replaced whenever AReaL makes a logger of its own, so "
        "that loggers made before reach nobody.",
        "AReaL leaves the root logger alone",
        "none: use `logging.getLogger`",
    ),
)


def check_versions(run: ResolvedRun) -> None:
    """Compare the packages that a run uses with those that the repairs were made for.

    Ray counts only under its scheduler, torch only where a tree engine has several
    ranks.

    Raises:
        ConfigError: a version for which a repair was not made; names the repair.
    """
    packages = {"areal"}
    if run.config.scheduler.type == "ray":
        packages.add("ray")
    backends = [model.backend for model in run.models]
    if any(b.engine == "dta" and b.num_ranks > 1 for b in backends):
        packages.add("torch")
    for repair in REPAIRS:
        if repair.package in packages:
            repair.check_version()


def table_row(repair: Repair) -> str:
    """Return a repair as a row of the Markdown table in `docs/repairs.md`."""
    module, name = repair.name.split(".")
    found = import_module(f"areal_dta.areal_fixes.{module}")
    remedy = getattr(found, name).__doc__.partition("\n")[0].rstrip(".")
    made_for = f"{repair.package} {repair.versions}".strip()
    cells = (f"`{repair.name}`", made_for, repair.fault, remedy, repair.until)
    return f"| {' | '.join((*cells, repair.undo))} |"


@contextmanager
def wrapped(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace a method of one object while the context is active."""
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
