"""Options of the collector: defaults that drop nothing, and values that cannot work."""

import pytest

from areal_dta.config.collector_options import CollectorOptions
from areal_dta.config.composed import ConfigError


def test_by_default_nothing_is_dropped_for_its_age() -> None:
    assert CollectorOptions().max_staleness is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_staleness", -1),
        ("max_rejected_share", 1.5),
        ("max_rejected_share", -0.1),
        ("max_batches_without_result", 0),
        ("fetch_timeout_seconds", 0.0),
        ("fetch_timeout_seconds", float("nan")),
    ],
)
def test_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"collector\.{name}={value}; expected"):
        CollectorOptions(**{name: value})  # type: ignore[arg-type]
