"""What is installed, and which combinations are known to be wrong.

Facts and judgement are apart, so that tests judge machines that do not exist here
(tests/doctor/test_machine.py).
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "peft",
    "areal",
    "sglang",
    "vllm",
    "flash-attn",
    "flash-attn-4",
    "flash-linear-attention",
    "causal-conv1d",
)
_PINNED = frozenset({"torch", "triton", "transformers"})
"""Packages whose versions others pin; the pins are compared with what is installed."""
_AREAL = "1.0.4"
_PYTHON = (Version("3.11"), Version("3.13"))
_TORCH = (Version("2.9.1"), Version("2.11"))
_TRANSFORMERS = (Version("5.0.0"), Version("6"))
_MIN_CAPABILITY = (8, 0)
_INSTALL = "docs/gpu.md has the command that installs versions that fit"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that torch can use."""

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about this machine."""

    python: str
    processor: str
    cores: int
    memory_bytes: int
    versions: dict[str, str]
    """Installed ones of `PACKAGES`."""
    torch_cuda: str | None = None
    """CUDA version that torch is built for; None: a build without CUDA."""
    torch_archs: tuple[str, ...] = ()
    """GPU architectures that torch's own kernels are built for, such as sm_90."""
    has_flash: bool = False
    """Whether torch is built with its flash attention for CUDA."""
    nccl: str | None = None
    num_driver_cards: int = 0
    """Cards that the driver shows, whether torch can use them or not."""
    cards: tuple[Card, ...] = ()
    requirements: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Per package what it asks of `_PINNED`, as in its metadata."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth knowing; a problem makes the exit code 1."""

    is_problem: bool
    text: str


def inspect_machine() -> Machine:
    """Collect the facts. Imports torch, and initialises CUDA where there is a card."""
    import torch

    versions = {name: v for name in PACKAGES if (v := _version(name)) is not None}
    nccl = None
    cards: list[Card] = []
    if torch.cuda.is_available():
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            cards.append(
                Card(
                    torch.cuda.get_device_name(index),
                    torch.cuda.get_device_capability(index),
                    total,
                    free,
                )
            )
    return Machine(
        python=platform.python_version(),
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        versions=versions,
        torch_cuda=torch.version.cuda,
        torch_archs=tuple(torch.cuda.get_arch_list()),
        has_flash=torch.version.cuda is not None
        and torch.backends.cuda.is_flash_attention_available(),
        nccl=nccl,
        num_driver_cards=_num_driver_cards(),
        cards=tuple(cards),
        requirements={name: _pins(name) for name in versions},
    )


def judge_machine(machine: Machine) -> list[Finding]:
    """Return what is wrong with the combination, and what is worth knowing."""
    problems = [*_card_problems(machine), *_version_problems(machine)]
    return [
        *(Finding(True, text) for text in problems),
        *(Finding(False, text) for text in _notes(machine)),
    ]


def _card_problems(machine: Machine) -> list[str]:
    num, torch = machine.num_driver_cards, machine.versions.get("torch")
    found = []
    if num and machine.torch_cuda is None:
        found.append(
            f"{num} GPU(s) here, but torch {torch} is built without CUDA; {_INSTALL}"
        )
    elif num and not machine.cards:
        found.append(
            f"{num} GPU(s) here, but torch {torch} finds none: its CUDA "
            f"{machine.torch_cuda} needs a newer driver, or CUDA_VISIBLE_DEVICES is "
            "empty; compare with nvidia-smi"
        )
    for card in dict.fromkeys((card.name, card.capability) for card in machine.cards):
        name, (major, minor) = card
        if (major, minor) < _MIN_CAPABILITY:
            found.append(
                f"{name} has compute capability {major}.{minor}; flash attention and "
                "bf16 need 8.0 (Ampere) or later"
            )
        elif machine.torch_archs and not _runs_on(machine.torch_archs, major, minor):
            archs = ", ".join(machine.torch_archs)
            found.append(
                f"torch {torch} is built for {archs}, not for sm_{major}{minor} of "
                f"{name}; {_INSTALL}"
            )
    if machine.cards and not machine.has_flash:
        found.append(
            f"torch {torch} is built without flash attention, which the executor uses "
            f"on GPUs; {_INSTALL}"
        )
    if len(machine.cards) > 1 and machine.nccl is None:
        found.append(
            f"{len(machine.cards)} GPUs, but torch {torch} has no NCCL: only one can "
            "train"
        )
    return found


def _runs_on(archs: tuple[str, ...], major: int, minor: int) -> bool:
    """Return whether some binary fits: same major version, and not a later minor one.

    PTX (``compute_…``) fits all later cards.
    """
    for arch in archs:
        kind, _, digits = arch.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and built <= (major, minor):
            return True
        if built[0] == major and built[1] <= minor:
            return True
    return False


def _version_problems(machine: Machine) -> list[str]:
    versions = machine.versions
    found = []
    if not _PYTHON[0] <= Version(machine.python) < _PYTHON[1]:
        found.append(f"Python {machine.python}; supported are 3.11 and 3.12")
    for name, (lowest, limit) in {
        "torch": _TORCH,
        "transformers": _TRANSFORMERS,
    }.items():
        got = versions.get(name)
        if got is None:
            found.append(f"{name} is not installed")
        elif not lowest <= Version(got) < limit:
            found.append(
                f"{name} {got} is outside of what is tested, {lowest} to below "
                f"{limit}; {_INSTALL}"
            )
    if (areal := versions.get("areal")) not in (None, _AREAL):
        found.append(
            f"areal {areal}; this package repairs and extends {_AREAL} and refuses "
            f"others: pip install areal=={_AREAL}"
        )
    # What the installed packages ask of one another: AReaL takes torch up to 2.10,
    # SGLang exactly 2.9.1, and pip keeps whichever was installed last.
    for package, requirements in machine.requirements.items():
        for text in requirements:
            requirement = Requirement(text)
            got = versions.get(requirement.name)
            fits = requirement.specifier.contains(got or "0", prereleases=True)
            if got is not None and not fits:
                found.append(
                    f"{package} {versions[package]} needs {requirement.name}"
                    f"{requirement.specifier}, but {got} is installed; {_INSTALL}"
                )
    return found


def _notes(machine: Machine) -> list[str]:
    versions = machine.versions
    found = []
    if "areal" not in versions:
        found.append(
            "AReaL is not installed: the executor works, whole runs do not "
            f"(pip install areal=={_AREAL})"
        )
    if not machine.cards:
        return found
    if "sglang" not in versions and "vllm" not in versions:
        found.append(
            "neither sglang nor vllm is installed: rollouts come from the embedded "
            "server, which is made for CPUs and small models"
        )
    if "flash-attn" not in versions:
        found.append(
            "flash-attn is not installed: the dense engines use sdpa; the tree engine "
            "uses the flash attention that comes with torch"
        )
    if "triton" not in versions:
        found.append(
            "triton is not installed: norms and MLPs are not fused (dta.fused_layers), "
            "and there is no kernel=triton_tree"
        )
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _pins(name: str) -> tuple[str, ...]:
    """Return the requirements of a package on those in `_PINNED`, extras left out."""
    found = []
    for text in metadata.requires(name) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        applies = marker is None or marker.evaluate({"extra": ""})
        if requirement.name in _PINNED and applies and requirement.specifier:
            found.append(f"{requirement.name}{requirement.specifier}")
    return tuple(found)


def _num_driver_cards() -> int:
    shown = Path("/proc/driver/nvidia/gpus")
    return len(list(shown.iterdir())) if shown.is_dir() else 0


def processor_name() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
