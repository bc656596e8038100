"""What the machine has, as far as the choice of settings depends on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """An option of the ``hardware`` config group, and why it fits."""

    choice: str
    reason: str


def num_gpus() -> int:
    """CUDA devices that PyTorch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def detect_hardware() -> Hardware:
    """What ``hardware=auto`` means on this machine."""
    import torch

    if count := num_gpus():
        return Hardware("gpu", f"found {count} x {torch.cuda.get_device_name(0)}")
    if torch.version.cuda is None:
        return Hardware("cpu", f"torch {torch.__version__} is built without CUDA")
    return Hardware("cpu", f"torch {torch.__version__} finds no CUDA device")
