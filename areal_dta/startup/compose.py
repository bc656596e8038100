"""Find and compose a YAML configuration. Light: Hydra alone, no torch and no AReaL.

A bare name is looked up in the working directory, then among the project's own
configurations; the project's config groups (``hardware``, ``model``, ...) are there for
either. Overrides follow Hydra's grammar. ``key=value`` may name any key of the schema,
also one that the YAML leaves at its default: the schema, not the YAML, decides later
whether the key exists (see `areal_dta.config.schema.to_structured`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import (
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from areal_dta.config.composed import Composed, ConfigError, did_you_mean, one_line

MAX_WORKER_THREADS = 4  # more do not help models that fit on a CPU


def project_config_dir() -> Path:
    """Return the folder of our configurations: in the wheel, or beside the package."""
    package = Path(__file__).parents[1]
    for candidate in (package / "configs", package.parent / "configs"):
        if (candidate / "gsm8k_grpo.yaml").is_file():
            return candidate
    raise ConfigError(
        f"the project's configs/ is missing from {package} and {package.parent}; "
        "reinstall areal_dta, or run from a clone installed with `pip install -e .`"
    )


def find_config(name: str) -> Path:
    """Return the path of a configuration given as a path or as a bare name.

    Raises:
        ConfigError: there is none; the message lists what there is.
    """
    project = project_config_dir()
    bare = os.path.basename(name) == name
    for folder in (Path.cwd(), project) if bare else (Path.cwd(),):
        for candidate in (name, f"{name}.yaml"):
            path = folder / candidate
            if path.suffix in (".yaml", ".yml") and path.is_file():
                return path.resolve()
    available = sorted(p.name for p in project.glob("*.yaml"))
    where = f"{Path.cwd()} or {project}" if bare else str((Path.cwd() / name).parent)
    hint = did_you_mean(os.path.basename(name), available)
    raise ConfigError(
        f"no configuration file {name!r} in {where}{hint}; "
        f"the project has {', '.join(available)}"
    )


def compose(file: Path, overrides: Sequence[str]) -> Composed:
    """Compose a configuration with Hydra.

    Raises:
        ConfigError: bad YAML, bad override syntax, or an unknown group option.
    """
    project = project_config_dir()
    # Only the project's own groups: the working directory may hold any folders.
    groups = tuple(sorted({yaml.parent.name for yaml in project.glob("*/*.yaml")}))
    register_resolvers()
    try:
        # A plain key=value may add a key, unless it selects a group's option.
        parsed = OverridesParser.create().parse_overrides(overrides=list(overrides))
        for override in parsed:
            if override.key_or_group in groups:
                _check_option(override, project)
        lines = [
            f"++{override.input_line}"
            if override.type is OverrideType.CHANGE
            and override.key_or_group not in groups
            else str(override.input_line)
            for override in parsed
        ]
        if file.parent != project:
            lines.append(f"hydra.searchpath=[file://{project}]")
        GlobalHydra.instance().clear()
        with initialize_config_dir(config_dir=str(file.parent), version_base="1.3"):
            config = hydra_compose(file.stem, overrides=lines, return_hydra_config=True)
        named = {str(key) for key in OmegaConf.load(file)}
        named |= {o.key_or_group.split(".")[0] for o in parsed}
        choices = {k: str(v) for k, v in config.hydra.runtime.choices.items()}
        with open_dict(config):
            del config["hydra"]
            if fileroot := OmegaConf.select(config, "cluster.fileroot"):
                if not isinstance(fileroot, str):
                    raise ConfigError(
                        f"cluster.fileroot={fileroot}; expected the name of a directory"
                    )
                # Workers and saved configurations must not depend on the directory in
                # which the run was started.
                config.cluster.fileroot = str(Path(fileroot).expanduser().absolute())
    except OverrideParseException as e:
        reason = one_line(e).removeprefix(f"Error parsing override '{e.override}' ")
        raise ConfigError(
            f"cannot read the override {e.override!r}: {reason.split(' See http')[0]}; "
            "expected key=value"
        ) from e
    except MissingConfigException as e:
        raise ConfigError(_missing_option(e)) from e
    except (HydraException, OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(f"{file.name}: {one_line(e)}") from e
    taken = {g: choices[g] for g in groups if g in choices}
    return Composed(config, file, taken, groups, frozenset(named))


def run_dir(composed: Composed) -> Path:
    """Return the directory of a run: ``<cluster.fileroot>/<experiment>/<trial>``.

    Raises:
        ConfigError: one of the three is missing.
    """
    names = []
    for key in ("cluster.fileroot", "experiment_name", "trial_name"):
        value = OmegaConf.select(composed.config, key, throw_on_missing=False)
        if not value:
            raise ConfigError(f"no value for {key}; set it in {composed.file.name}")
        names.append(str(value))
    return Path(*names)


def num_gpus() -> int:
    """Return the number of CUDA devices that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def detect_hardware() -> tuple[str, str]:
    """Return the option that ``hardware=auto`` means on this machine, and why."""
    import torch

    if count := num_gpus():
        return "gpu", f"found {count} x {torch.cuda.get_device_name(0)}"
    if torch.version.cuda is None:
        return "cpu", f"torch {torch.__version__} is built without CUDA"
    return "cpu", f"torch {torch.__version__} finds no CUDA device"


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use, e.g. in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def register_resolvers() -> None:
    """Register the functions of the YAML files, which OmegaConf calls late."""
    resolvers = {
        "tiny_model": _tiny_model_path,
        "worker_threads": lambda: max(1, min(MAX_WORKER_THREADS, usable_cpus() // 2)),
        "gpu_rollout": _gpu_rollout_backend,
        "gpu_attention": lambda: (
            "flash_attention_2" if find_spec("flash_attn") else "sdpa"
        ),
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True, use_cache=False)


def _tiny_model_path() -> str:
    from areal_dta.embedded import tiny_model_path

    return str(tiny_model_path())


def _gpu_rollout_backend() -> str:
    installed = [name for name in ("sglang", "vllm") if find_spec(name)]
    return f"{installed[0]}:d1" if installed else "local:d1"


def _check_option(override: Override, project: Path) -> None:
    """Check that what is set for a group can name one of its options.

    Hydra fails on numbers and null with an error of Python's, reads a list as several
    options of which the last wins, and follows paths out of the group.
    """
    is_deletion = override.type is OverrideType.DEL
    if override.is_sweep_override() or (is_deletion and override.value() is None):
        return
    value = override.value()
    if not isinstance(value, str) or "/" in value or os.sep in value:
        group = override.key_or_group
        options = sorted(path.stem for path in (project / group).glob("*.yaml"))
        raise ConfigError(
            f"{override.input_line}: expected the name of one option of {group!r}, "
            f"such as {', '.join(options)}"
        )


def _missing_option(error: MissingConfigException) -> str:
    if not error.options or not error.missing_cfg_file:
        return one_line(error).split(" Config search path:")[0]
    group, _, option = error.missing_cfg_file.rpartition("/")
    return (
        f"{group}={option}: no such option{did_you_mean(option, error.options)}; "
        f"expected one of {', '.join(error.options)}"
    )
