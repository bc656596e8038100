"""Pages on a run's batches (``report.inspect_every``), written beside the training.

A page must never cost a run: what goes wrong is a warning, once, and no page is begun
while one is being made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from areal_dta.config.composed import one_line
from areal_dta.config.resolved import ResolvedRun
from areal_dta.inspect.analysis import analyse
from areal_dta.inspect.corpus import Corpus, Record
from areal_dta.inspect.models import model_sizes
from areal_dta.inspect.page import page
from areal_dta.inspect.prediction import Budgets
from areal_dta.inspect.rollouts.arrays import spans_of
from areal_dta.inspect.rollouts.text import TextTokenizer, load_tokenizer
from areal_dta.report.batch_sharing import BatchMeter, BatchTokens


class BatchPages:
    """Writes ``inspect/step-N.html`` in a run's folder for every N-th batch.

    Args:
        every: steps from one page to the next.
        folder: of the run.
        num_steps_done: steps of the run before the first batch.
        tokenizer: path of the run's tokenizer, to show texts.
        model: path of the model that is trained.
        dtype: in which it computes.
        warn: called with a text, at most once.
    """

    def __init__(
        self,
        every: int,
        folder: Path,
        num_steps_done: int,
        meter: BatchMeter,
        num_ranks: int,
        tokenizer: str,
        model: str,
        dtype: str,
        warn: Callable[[str], None],
    ) -> None:
        self._every, self._folder = every, folder / "inspect"
        self._step = num_steps_done
        self._meter, self._num_ranks = meter, num_ranks
        self._paths = tokenizer, model
        self._dtype = dtype
        self._warn: Callable[[str], None] | None = warn
        self._tokenizer: TextTokenizer | None = None
        self._thread: threading.Thread | None = None

    def see(self, batch: Sequence[dict[str, Any]]) -> None:
        """Take notice of a step's batch; write its page if it is due."""
        self._step += 1
        is_busy = self._thread is not None and self._thread.is_alive()
        if (self._step - 1) % self._every or is_busy:
            return
        try:
            tokens = self._meter.tokens(batch)
        except Exception as error:  # a page must not end the run
            self._complain(error)
            return
        self._thread = threading.Thread(
            target=self._write, args=(self._step, tokens), daemon=True, name="inspect"
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the page that is being made, if any."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _write(self, step: int, tokens: BatchTokens) -> None:
        try:
            text = self._page(step, tokens)
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"step-{step}.html").write_text(text, encoding="utf-8")
        except Exception as error:  # a page must not end the run
            self._complain(error)

    def _page(self, step: int, tokens: BatchTokens) -> str:
        if self._tokenizer is None and self._paths[0]:
            self._tokenizer = load_tokenizer(self._paths[0])
        device = "gpu" if torch.cuda.is_available() else "cpu"
        model = model_sizes(self._paths[1], self._dtype, device)
        corpus = Corpus()
        for i, sequence in enumerate(tokens.sequences):
            spans = None
            if tokens.loss_masks is not None:
                spans = spans_of(np.asarray(tokens.loss_masks[i]) != 0)
            corpus.add(Record(_ids(sequence), f"sequence {i}", spans))
        budgets = Budgets(None, self._meter.block_tokens, self._meter.retain_tokens)
        source = {"files": {f"batch of step {step}": "a run"}, "notes": []}
        analysis = analyse(
            corpus, model, budgets, self._num_ranks, self._tokenizer, source
        )
        return page(analysis, f"Step {step}")

    def _complain(self, error: Exception) -> None:
        if self._warn is not None:
            self._warn(f"no page on a batch (report.inspect_every): {one_line(error)}")
        self._warn = None


def pages_of(
    run: ResolvedRun,
    folder: Path,
    num_steps_done: int,
    meter: BatchMeter,
    warn: Callable[[str], None],
) -> BatchPages | None:
    """Return what writes a run's pages on batches; None unless that was asked for."""
    config = run.config
    if not config.report.inspect_every:
        return None
    return BatchPages(
        config.report.inspect_every,
        folder,
        num_steps_done,
        meter,
        run.actor.backend.dp_size,
        config.tokenizer_path,
        config.actor.path,
        config.actor.dtype,
        warn,
    )


def _ids(sequence: NDArray[np.integer]) -> NDArray[np.int32]:
    return np.asarray(sequence).astype(np.int32)
