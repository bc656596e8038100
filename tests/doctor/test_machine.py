"""Combinations that do not work are named; those that do are not."""

import dataclasses

import pytest

from areal_dta.doctor.machine import Card, Machine, inspect_machine, judge_machine

H100 = Card("NVIDIA H100", (9, 0), 80 * 2**30, 79 * 2**30)
GOOD = Machine(
    python="3.12.3",
    processor="CPU",
    cores=8,
    memory_bytes=2**36,
    versions={
        "torch": "2.9.1",
        "transformers": "5.3.0",
        "triton": "3.5.1",
        "areal": "1.0.4",
        "sglang": "0.5.10.post1",
        "flash-attn": "2.8.3",
    },
    torch_cuda="12.8",
    torch_archs=("sm_80", "sm_90", "sm_100"),
    has_flash=True,
    nccl="2.27.5",
    num_driver_cards=1,
    cards=(H100,),
    requirements={
        "torch": ("triton==3.5.1",),
        "areal": ("torch<2.11,>=2.9.1", "transformers<=5.3.0,>=5.0.0"),
        "sglang": ("torch==2.9.1", "transformers==5.3.0"),
    },
)


def changed(**facts) -> Machine:
    versions = GOOD.versions | facts.pop("versions", {})
    versions = {name: v for name, v in versions.items() if v is not None}
    return dataclasses.replace(GOOD, versions=versions, **facts)


def texts(machine: Machine, problems: bool) -> str:
    return "\n".join(f.text for f in judge_machine(machine) if f.is_problem == problems)


def test_versions_that_fit_give_no_finding():
    assert judge_machine(GOOD) == []


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (
            changed(versions={"torch": "2.10.0"}),
            ["sglang 0.5.10.post1 needs torch==2.9.1, but 2.10.0 is installed"],
        ),
        (changed(versions={"triton": "3.6.0"}), ["torch 2.9.1 needs triton==3.5.1"]),
        (
            changed(torch_cuda=None, cards=(), nccl=None, has_flash=False),
            ["1 GPU(s) here", "built without CUDA", "docs/gpu.md"],
        ),
        (changed(cards=()), ["finds none", "newer driver"]),
        (
            changed(versions={"transformers": "4.57.1"}),
            ["transformers 4.57.1 is outside", "areal 1.0.4 needs transformers"],
        ),
        (changed(versions={"transformers": "5.4.0"}), ["<=5.3.0"]),
        (changed(versions={"torch": "2.8.0"}), ["torch 2.8.0 is outside"]),
        (changed(versions={"areal": "1.0.5"}), ["areal==1.0.4"]),
        (changed(versions={"torch": None}), ["torch is not installed"]),
        (changed(python="3.13.1"), ["3.11 and 3.12"]),
        (
            changed(cards=(dataclasses.replace(H100, capability=(7, 5)),)),
            ["7.5", "need 8.0"],
        ),
        (changed(torch_archs=("sm_80", "sm_86")), ["not for sm_90"]),
        (changed(has_flash=False), ["without flash attention"]),
        (changed(cards=(H100, H100), nccl=None), ["no NCCL"]),
    ],
    ids=lambda x: x[0][:30] if isinstance(x, list) else "",
)
def test_wrong_combinations_are_named(machine, words):
    found = texts(machine, problems=True)
    for word in words:
        assert word in found, found


def test_architectures():
    later = Card("RTX", (12, 0), 2**34, 2**34)
    for archs, fits in [
        (("sm_120",), True),
        (("sm_80", "compute_90"), True),  # PTX is compiled for later cards
        (("sm_80", "sm_90a"), False),
        ((), True),  # unknown
    ]:
        problems = texts(changed(cards=(later,), torch_archs=archs), problems=True)
        assert (not problems) == fits, (archs, problems)
    # binaries serve later cards of the same generation
    ada = Card("L40", (8, 9), 2**34, 2**34)
    assert not texts(changed(cards=(ada,), torch_archs=("sm_86",)), problems=True)


def test_what_is_missing_is_noted():
    missing = {"areal": None, "sglang": None, "flash-attn": None, "triton": None}
    machine = changed(versions=missing, requirements={})
    assert not texts(machine, problems=True)
    notes = texts(machine, problems=False)
    for word in ("AReaL", "embedded server", "flash-attn", "norms and MLPs"):
        assert word in notes


def test_this_machine_is_read():
    machine = inspect_machine()
    assert machine.versions["torch"].startswith("2.")
    assert any("triton" in text for text in machine.requirements["torch"])
    assert machine.cores >= 1 and machine.memory_bytes > 2**30
    # Extras are not asked for: they are not installed.
    assert not any("sglang" in text for text in machine.requirements.get("areal", ()))
