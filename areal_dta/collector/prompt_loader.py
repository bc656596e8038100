"""Prompts that are each trained once, across failures and restarts.

AReaL saves how far its data loader has come, with up to several batches of prompts
issued and not yet trained: a restart loses them. And it restarts the shuffle at epoch
0, so a run that is resumed in a later epoch sees another order.

Here every prompt issued has a number, which stands for its epoch and place in it. It
is *settled* when it has gone into a batch, or was rejected for good. What is saved is
the next number and those that are not settled; a restart issues the latter once more.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any

from areal.utils import logging
from torchdata.stateful_dataloader import StatefulDataLoader

logger = logging.getLogger("Prompts")

MAX_TRIES = 3
_FORMAT = "areal_dta.prompts/1"


class PromptLoader:
    """Stands for the data loader that it is made from.

    Iterating never ends, and yields lists of one prompt: AReaL takes prompts one by one
    as rollouts have room. Thread-safe.
    """

    def __init__(self, loader: StatefulDataLoader) -> None:
        self.batch_size = loader.batch_size
        self._dataset, self._sampler = loader.dataset, loader.sampler
        self._steps_per_epoch = len(loader)
        num = len(self._sampler)
        if loader.drop_last:
            num = self._steps_per_epoch * int(loader.batch_size)
        self.num_prompts = num
        """Issued in an epoch."""
        self._lock = threading.Lock()
        self._epoch = -1
        self._places: list[int] = []
        self._next = 0
        self._again: deque[int] = deque()
        self._unsettled: set[int] = set()
        self._tries: Counter[int] = Counter()
        self._issued: dict[int, tuple[dict[str, Any], int]] = {}  # by id()

    def __len__(self) -> int:
        """Training steps in an epoch."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [self._issue()]

    def number_of(self, prompt: Any) -> int | None:
        """Of a prompt that was issued here and is not settled; None of others."""
        with self._lock:
            found = self._issued.get(id(prompt))
        return found[1] if found is not None and found[0] is prompt else None

    def settle(self, prompt: Any) -> None:
        """It is trained, or never will be."""
        self._end(prompt, again=False)

    def put_back(self, prompt: Any) -> bool:
        """Issue it once more, before new ones; False if it was tried too often."""
        return self._end(prompt, again=True)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "format": _FORMAT,
                "num_prompts": self.num_prompts,
                "next": self._next,
                "unsettled": sorted(self._unsettled),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: it is of another loader, or of another data set.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the recover checkpoint's data loader state holds {sorted(state)}, "
                f"not {_FORMAT}; it was written by another version: set "
                "recover.mode=off, or another trial_name"
            )
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the recover checkpoint is of {state['num_prompts']} prompts an "
                f"epoch, the data set has {self.num_prompts}; continue with the same "
                "train_dataset, or set recover.mode=off"
            )
        with self._lock:
            self._next = int(state["next"])
            self._unsettled = set(map(int, state["unsettled"]))
            self._again = deque(sorted(self._unsettled))
            self._issued.clear()
            self._tries.clear()
        if self._again:
            logger.info(
                f"{len(self._again)} prompts that were issued and not trained are "
                f"issued once more, then from number {self._next} on"
            )

    def _issue(self) -> dict[str, Any]:
        with self._lock:
            if self._again:
                number = self._again.popleft()
            else:
                number = self._next
                self._next += 1
            self._unsettled.add(number)
            prompt = dict(self._dataset[self._place(number)])  # an object of its own
            self._issued[id(prompt)] = prompt, number
            return prompt

    def _place(self, number: int) -> int:
        epoch, i = divmod(number, self.num_prompts)
        if epoch != self._epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            self._places, self._epoch = list(self._sampler), epoch
        return self._places[i]

    def _end(self, prompt: Any, again: bool) -> bool:
        with self._lock:
            found = self._issued.get(id(prompt))
            if found is None or found[0] is not prompt:
                return False
            del self._issued[id(prompt)]
            number = found[1]
            self._tries[number] += 1
            if again and self._tries[number] < MAX_TRIES:
                self._again.append(number)
                return True
            self._unsettled.discard(number)
            self._tries.pop(number, None)
        if again:
            logger.error(
                f"prompt {number} is given up: {MAX_TRIES} rollouts of it failed or "
                "became stale"
            )
        return False
