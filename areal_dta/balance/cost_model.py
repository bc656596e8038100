"""Predicted seconds of blocks, learned from measured ones.

Model: seconds = c · features with c >= 0; one c for blocks with a graph, one for those
without. It starts from analytic FLOPs. The measured blocks of a window are fitted by
non-negative least squares on relative errors, with three additions:
  * Prior: each coefficient is drawn to its FLOPs value, scaled to the measured speed,
    as hard as a few blocks would. What the blocks do not tell apart keeps its ratio.
  * Outliers (a hiccup of the machine) lose weight: reweighted least squares with
    Cauchy's weights.
  * Levels: the machine's speed may change. Runs of blocks at another speed than the
    newest run are scaled to it, so that old blocks still tell the shape of the cost.
Invariants: tests/balance/test_cost_model.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from areal_dta.schedule.block_features import (
    FORWARD,
    KINDS,
    NUM_FEATURES,
    SAMPLE_FLOATS,
    TRAINING,
    BlockFeatures,
    BlockSample,
    schedule_features,
)
from areal_dta.schedule.flops import FlopModel
from areal_dta.schedule.schedule import Schedule
from areal_dta.tree import PrefixTree

__all__ = ["BlockFeatures", "BlockSample", "Coefficients", "CostModel"]

FloatArray = NDArray[np.float64]

DEFAULT_WINDOW = 1000
NOMINAL_FLOPS_PER_SECOND = 1e11
"""Nominal speed of no particular machine: only ratios matter until blocks run."""
_OVERHEAD_TOKENS = 16  # what a call costs at first, in tokens
_LOSS_SHARE = 1e-3  # what the loss of a token costs at first, in tokens
_PADDING_TOKENS = 16  # in a scan, per segment: half of a chunk of 32

_PRIOR_WEIGHT = 0.02  # squared relative error that a prior off by 100 % counts as
_RUN_SAMPLES = 32  # blocks whose median error tells the machine's speed
_LEVEL_DEAD_ZONE = 0.1  # log units: smaller differences are composition, not speed
_ROUNDS = 3  # of reweighting
_MIN_SPREAD = 0.03  # log units: no block is an outlier for a smaller error


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per count, in the order of BlockFeatures."""

    per_block: float
    per_grad_token: float
    per_no_grad_token: float
    per_pair: float
    per_output: float
    per_loss_token: float
    per_segment: float = 0.0

    def as_array(self) -> FloatArray:
        return np.array(dataclasses.astuple(self))

    def seconds(self, features: BlockFeatures) -> float:
        return float(self.as_array() @ np.array(features.as_tuple()))


class CostModel:
    """Prices of blocks, schedules and (through ``pricing``) sets of sequences.

    Fits lazily, when a price is asked for after new samples: some milliseconds. Not
    thread-safe.
    """

    def __init__(
        self, prior: Mapping[str, Coefficients], window: int = DEFAULT_WINDOW
    ) -> None:
        """Start from ``prior``: coefficients for each of KINDS.

        Raises:
            ValueError: a kind is missing, a coefficient is negative, or ``window`` is
                below 1.
        """
        missing = set(KINDS) - set(prior)
        if missing:
            raise ValueError(f"prior lacks {sorted(missing)}; expected {list(KINDS)}")
        for kind in KINDS:
            values = prior[kind].as_array()
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"prior[{kind!r}]={prior[kind]}; expected all >= 0")
        if window < 1:
            raise ValueError(f"window={window}; expected at least 1 block")
        self.window = window
        self._fits = {kind: _Fit(prior[kind], window) for kind in KINDS}
        self.num_rejected = 0
        """Samples left out because they were not finite or not positive."""

    @classmethod
    def from_flops(
        cls,
        flops: FlopModel,
        flops_per_second: float = NOMINAL_FLOPS_PER_SECOND,
        window: int = DEFAULT_WINDOW,
    ) -> CostModel:
        """Start from analytic FLOPs; a backward costs two forwards."""
        prior = {}
        for kind, factor in ((TRAINING, 3.0), (FORWARD, 1.0)):
            scale = factor / flops_per_second
            token = flops.per_token * scale
            prior[kind] = Coefficients(
                per_block=_OVERHEAD_TOKENS * token,
                per_grad_token=token,
                per_no_grad_token=flops.per_token / flops_per_second,
                per_pair=flops.per_pair * scale,
                per_output=flops.per_output * scale,
                per_loss_token=_LOSS_SHARE * token * (kind == TRAINING),
                per_segment=_PADDING_TOKENS * flops.scan_per_token * scale,
            )
        return cls(prior, window)

    def observe(
        self, samples: Iterable[BlockSample] | NDArray[np.floating[Any]]
    ) -> None:
        """Learn from measured blocks, in the order in which they ran.

        Args:
            samples: blocks of one trainer, or of several in turn; or an array [n, 9]
                of their ``to_floats``. Samples of one call are equally old. If they
                exceed the window, evenly spaced ones are kept.
        """
        if not isinstance(samples, np.ndarray):
            samples = np.array([s.to_floats() for s in samples], np.float64)
        x = np.asarray(samples, np.float64).reshape(-1, SAMPLE_FLOATS)
        good = np.isfinite(x).all(1) & (x >= 0).all(1)
        good &= (x[:, NUM_FEATURES] > 0) & (x[:, :NUM_FEATURES].sum(1) > 0)
        good &= x[:, -1] < len(KINDS)
        self.num_rejected += int((~good).sum())
        x = x[good]
        for index, kind in enumerate(KINDS):
            self._fits[kind].add(x[x[:, -1] == index, :-1])

    def coefficients(self, kind: str = TRAINING) -> Coefficients:
        return self._fits[kind].coefficients()

    def num_samples(self, kind: str = TRAINING) -> int:
        """Measured blocks in the window."""
        return len(self._fits[kind].samples)

    def seconds(self, features: BlockFeatures, kind: str = TRAINING) -> float:
        """Return the seconds of one block, or of several whose counts are added up."""
        return self.coefficients(kind).seconds(features)

    def schedule_seconds(self, tree: PrefixTree, schedule: Schedule) -> float:
        """Return the seconds of a pass: each of its blocks by its own counts."""
        blocks = schedule_features(tree, schedule)
        return sum(self.seconds(features, kind) for kind, features in blocks)

    def median_error(self, samples: Iterable[BlockSample]) -> float:
        """Return the median of |predicted - measured| / measured; nan of no samples."""
        errors = [
            abs(self.seconds(s.features, s.kind) - s.seconds) / s.seconds
            for s in samples
        ]
        return float(np.median(errors)) if errors else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, lists and strings: what JSON can hold."""
        return {
            "version": 2,
            "window": self.window,
            "kinds": {kind: fit.state_dict() for kind, fit in self._fits.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, prior and window included.

        Raises:
            ValueError: it is not the state of a cost model, which is then unchanged.
        """
        try:
            if state["version"] not in (1, 2):
                raise ValueError(f"version {state['version']}, expected 2")
            window = int(state["window"])
            fits = {
                kind: _Fit.from_state(state["kinds"][kind], window) for kind in KINDS
            }
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"not the state of a cost model ({error!r}); expected what state_dict "
                "returns: delete the file to start from FLOPs"
            ) from error
        self.window, self._fits = window, fits


class _Fit:
    """The samples and coefficients of one kind."""

    def __init__(self, prior: Coefficients, window: int) -> None:
        self.prior, self.window = prior, window
        self.samples = np.zeros((0, NUM_FEATURES + 1))  # features, seconds
        self.arrival = np.zeros(0)  # samples seen when the sample's call was over
        self.num_seen = 0
        self._fitted: Coefficients | None = None

    def add(self, new: FloatArray) -> None:
        if not len(new):
            return
        self.num_seen += len(new)
        if len(new) > self.window:
            picked = np.linspace(0, len(new) - 1, self.window).round().astype(int)
            new = new[picked]
        self.samples = np.concatenate([self.samples, new])[-self.window :]
        arrival = np.full(len(new), float(self.num_seen))
        self.arrival = np.concatenate([self.arrival, arrival])[-self.window :]
        self._fitted = None

    def coefficients(self) -> Coefficients:
        if self._fitted is None:
            self._fitted = Coefficients(*self._fit().tolist())
        return self._fitted

    def _fit(self) -> FloatArray:
        # Blocks that the prior can price.
        prior = self.prior.as_array()
        x, y = self.samples[:, :-1], self.samples[:, -1]
        predicted = x @ prior
        priced = predicted > 0
        if not priced.any():
            return prior
        # Imported here: what only runs the executor needs no SciPy.
        from scipy.optimize import nnls

        x, y, arrival = x[priced], y[priced], self.arrival[priced]
        # Scale the prior to the speed of the newest run.
        run = _runs(arrival)
        error = np.log(y / predicted[priced])
        prior = prior * np.exp(np.median(error[run == 0]))
        # Fit theta, the coefficients in units of the prior: columns of one scale.
        theta = np.ones(NUM_FEATURES)
        error = np.log(y / (x @ prior))
        for _ in range(_ROUNDS):
            # Weights: what is far off at the level of its run counts less.
            level = _levels(error, run)
            centred = error - level
            centred -= np.median(centred)
            spread = max(_MIN_SPREAD, 1.4826 * float(np.median(np.abs(centred))))
            weight = 1 / (1 + (centred / (2 * spread)) ** 2)
            # Relative errors at the newest speed, and the prior as further equations.
            target = y / np.exp(level)
            root = np.sqrt(weight)
            a = np.concatenate(
                [
                    root[:, None] * (x * prior) / target[:, None],
                    np.sqrt(_PRIOR_WEIGHT) * np.eye(NUM_FEATURES),
                ]
            )
            b = np.concatenate([root, np.full(NUM_FEATURES, np.sqrt(_PRIOR_WEIGHT))])
            theta, _ = nnls(a, b)
            error = np.log(y / np.maximum(x @ (prior * theta), 1e-3 * y))
        return np.asarray(prior * theta, np.float64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "prior": self.prior.as_array().tolist(),
            "rows": self.samples.tolist(),
            "arrival": self.arrival.tolist(),
            "num_seen": self.num_seen,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], window: int) -> _Fit:
        prior = list(map(float, state["prior"]))
        fit = cls(Coefficients(*prior), window)
        samples = np.array(state["rows"], np.float64).reshape(-1, len(prior) + 1)
        if len(prior) < NUM_FEATURES:  # version 1: no segments
            samples = np.insert(samples, len(prior), 0.0, axis=1)
        arrival = np.array(state["arrival"], np.float64)
        if arrival.shape != (len(samples),) or not np.isfinite(samples).all():
            raise ValueError(f"{len(samples)} samples, {arrival.shape} arrivals")
        fit.samples, fit.arrival = samples, arrival
        fit.num_seen = int(state["num_seen"])
        return fit


def _runs(arrival: FloatArray) -> NDArray[np.int64]:
    """Return the run of each block; 0 is the newest.

    A run holds at least _RUN_SAMPLES consecutive blocks. Blocks of one call ran side
    by side and stay in one run.
    """
    run = np.zeros(len(arrival), np.int64)
    number, size = 0, 0
    for i in range(len(arrival) - 1, -1, -1):
        if size >= _RUN_SAMPLES and arrival[i] != arrival[i + 1]:
            number, size = number + 1, 0
        run[i] = number
        size += 1
    return run


def _levels(error: FloatArray, run: NDArray[np.int64]) -> FloatArray:
    """Return, per block, by how much (log) its run is slower than the newest run."""
    medians = np.array([np.median(error[run == r]) for r in range(run[0] + 1)])
    difference = medians - medians[0]
    difference[np.abs(difference) <= _LEVEL_DEAD_ZONE] = 0.0
    return np.asarray(difference[run], np.float64)
