"""Names of random streams: which numbers an answer is sampled with.

A server samples an answer from the stream that the run's seed and the answer's *draw
key* name, so which server answers, when, and beside which other requests makes no
difference. AReaL's client sends nothing that tells the samples of a prompt apart, so
`LocalBackend` sends the key:

- A prompt of our data loader has an id, which a resumed run continues. Its key is
  (prompt id, try, sample, turn); the sample is the index in the group, the turn counts
  the calls of one sample.
- Requests of other data loaders, of evaluations and of agent proxies, which run in
  another process, are told by their tokens: (purpose, weight version, tokens,
  occurrence). Equal requests of two such clients at one version share a stream.

An interrupted answer keeps its key, and goes on behind the numbers that it has used.
"""

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from areal.api import InferenceEngine, RolloutWorkflow
from areal.infra import workflow_context

from areal_dta.collector.prompt_issuer import PROMPT_ID_KEY

# (prompt, counter of its samples), and (sample, counter of its turns)
_group: ContextVar[tuple[str, Iterator[int]] | None] = ContextVar("group", default=None)
_sample: ContextVar[tuple[str, Iterator[int]] | None] = ContextVar(
    "sample", default=None
)


def prompt_digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


class KeyedGroup(RolloutWorkflow):
    """Workflow of a prompt: takes its id out of the data, for the draws."""

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        prompt_id = data.get(PROMPT_ID_KEY)
        _group.set(None if prompt_id is None else (prompt_id, itertools.count()))
        data = {key: value for key, value in data.items() if key != PROMPT_ID_KEY}
        return await self._workflow.arun_episode(engine, data)


class KeyedSample(RolloutWorkflow):
    """Workflow of one sample of a prompt, below `KeyedGroup`.

    AReaL starts the samples of a group in order, each in a task with its own context.
    """

    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        sample = None
        if group := _group.get():
            sample = f"prompt/{group[0]}/{next(group[1])}", itertools.count()
        _sample.set(sample)
        return await self._workflow.arun_episode(engine, data)


class DrawKeys:
    """Draw keys of one client."""

    def __init__(self) -> None:
        self._version: int | None = None
        self._occurrences: dict[str, Iterator[int]] = {}

    def next(self, prompt: Sequence[int], version: int) -> str:
        """Return the key of a new answer to `prompt`."""
        if sample := _sample.get():
            return f"{sample[0]}/{next(sample[1])}"
        if version != self._version:  # so that the table does not grow for ever
            self._version, self._occurrences = version, {}
        purpose = "eval" if workflow_context.get().is_eval else "train"
        key = f"{purpose}/{version}/{prompt_digest(prompt)}"
        occurrence = next(self._occurrences.setdefault(key, itertools.count()))
        return f"{key}/{occurrence}"
