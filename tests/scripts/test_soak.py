"""The soak test's fits and comparison, on made samples; no run is started."""

import numpy as np
import pytest
import soak
from bench.soak_workflow import DAMAGED, DAMAGES, FAILS, LATE, fate


def samples(slope_per_hour, noise=1.0, stretches=3):
    """Sample an hour: each stretch between two kills has a level of its own."""
    draw = np.random.default_rng(0)
    result = []
    for i in range(720):
        seconds = i * soak.SAMPLE_SECONDS
        stretch = i * stretches // 720
        age = seconds - stretch * 3600 / stretches
        value = 1000 + 50 * stretch + slope_per_hour * seconds / 3600
        value += noise * draw.standard_normal()
        if age < soak.WARM_UP_SECONDS:
            value = 0.0  # still starting: must not count
        sample = {"stretch": stretch, "seconds": seconds, "age": age}
        result.append(sample | dict.fromkeys(soak.SAMPLED, value))
    return result


def test_a_leak_is_found_whatever_the_levels_between_kills():
    fit = soak.slopes(samples(40.0))["memory MiB"]
    assert fit["slope_per_hour"] == pytest.approx(40.0, abs=fit["interval"] + 1)
    assert fit["slope_per_hour"] > fit["interval"]


def test_flat_values_have_no_slope():
    for fit in soak.slopes(samples(0.0)).values():
        assert abs(fit["slope_per_hour"]) < 2 * fit["interval"] + 1


def test_equal_steps_are_counted_until_the_first_difference():
    reference = [{"loss": 0.5, "reward": 0.1}] * 4
    faulty = [*reference[:2], {"loss": 0.75, "reward": 0.1}, reference[3], {}]
    found = soak.compare(reference, faulty)
    assert (found["steps"], found["equal_steps"]) == (4, 3)
    assert found["first_different_step"] == 3
    assert found["largest_loss_difference"] == 0.25


def test_fates_of_prompts_follow_from_their_text():
    fates = [fate(f"prompt {i}") for i in range(20_000)]
    assert fates[7] == fate("prompt 7")
    for kind, share in (("damaged", DAMAGED), ("fails", FAILS), ("late", LATE)):
        found = sum(name == kind for name, _ in fates) / len(fates)
        assert found == pytest.approx(share, rel=0.15)
    details = [detail for name, detail in fates if name == "damaged"]
    assert {int(detail * len(DAMAGES)) for detail in details} == {*range(len(DAMAGES))}
