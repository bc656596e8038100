"""Data loader that issues each prompt until it is trained, also across restarts.

AReaL saves how far its data loader has come, but up to several batches of prompts were
issued by then and not trained yet: a restart loses them. It also restarts the shuffle
at epoch 0, so a run that is resumed in a later epoch sees another order.

Here every prompt issued has a ``prompt_id``, which encodes its epoch and its position
in it. A prompt is *finished* when it was trained (went into a batch) or given up.
Saved are the next id and the unfinished ones; a restart issues the latter again. A
prompt whose rollout failed is issued again as well, ``MAX_TRIES`` times in all; one
whose result was dropped for its age, as often as that happens.
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
#: Where an issued prompt names its draws: its id, and how often it was tried before.
PROMPT_ID_KEY = "areal_dta_prompt_id"
_FORMAT = "areal_dta.prompts/1"  # the keys of the state are part of it


class PromptIssuer:
    """Takes the place of the data loader that it is made from.

    Iterating never ends, and yields lists of one prompt: AReaL takes prompts one by one
    as rollouts have room. Thread-safe.
    """

    def __init__(self, loader: StatefulDataLoader, add_ids: bool = False) -> None:
        """Take over `loader`; with `add_ids`, prompts hold `PROMPT_ID_KEY`."""
        self._add_ids = add_ids
        self.batch_size = loader.batch_size
        self._dataset, self._sampler = loader.dataset, loader.sampler
        self._steps_per_epoch = len(loader)
        self.num_prompts = len(self._sampler)
        """Number of prompts issued per epoch."""
        if loader.drop_last:
            self.num_prompts = self._steps_per_epoch * int(loader.batch_size)
        # Of the accounts: the event loop of the rollouts waits for it, so the data set,
        # which may be slow, is read under another one.
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._epoch = -1
        self._shuffled: list[int] = []  # indices of the epoch in the data set
        self._next_id = 0
        self._again: deque[int] = deque()
        self._unfinished: set[int] = set()
        self._tries: Counter[int] = Counter()
        # By id(prompt), as prompts may be equal; kept alive, so that ids stay unique.
        self._issued: dict[int, tuple[dict[str, Any], int]] = {}

    def __len__(self) -> int:
        """Return the number of training steps per epoch."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            yield [self._issue()]

    def finish(self, prompt: Any) -> int | None:
        """Mark the prompt as finished: trained, or given up.

        Returns:
            Its id; None if it was not issued here.
        """
        return self._end(prompt, again=False, has_failed=False)

    def issue_again(self, prompt: Any, has_failed: bool = True) -> int | None:
        """Issue the prompt again before new ones, or give it up after MAX_TRIES.

        Args:
            has_failed: counts as a try.
        """
        return self._end(prompt, again=True, has_failed=has_failed)

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {
                "format": _FORMAT,
                "num_prompts": self.num_prompts,
                "next": self._next_id,
                "unsettled": sorted(self._unfinished),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another loader was; its unfinished prompts are issued again.

        Raises:
            ValueError: the state is of another kind of loader or of another data set.
        """
        if state.get("format") != _FORMAT:
            raise ValueError(
                f"the recover checkpoint's data loader state holds {sorted(state)}, "
                f"not {_FORMAT}; it was written by another version: set "
                "recover.mode=off, or another trial_name"
            )
        if state["num_prompts"] != self.num_prompts:
            raise ValueError(
                f"the recover checkpoint is of {state['num_prompts']} prompts per "
                f"epoch, the data set has {self.num_prompts}; continue with the same "
                "train_dataset, or set recover.mode=off"
            )
        with self._lock:
            self._next_id = int(state["next"])
            self._unfinished = set(map(int, state["unsettled"]))
            self._again = deque(sorted(self._unfinished))
            self._issued.clear()
            self._tries.clear()
        if self._again:
            logger.info(
                f"{len(self._again)} prompts that were issued and not trained are "
                f"issued once more, then from number {self._next_id} on"
            )

    def _issue(self) -> dict[str, Any]:
        with self._lock:
            if self._again:
                prompt_id = self._again.popleft()
            else:
                prompt_id = self._next_id
                self._next_id += 1
            self._unfinished.add(prompt_id)
        with self._reading:
            # A copy, so that no two prompts in flight are the same object.
            prompt = dict(self._dataset[self._dataset_index(prompt_id)])
        with self._lock:
            if self._add_ids:
                prompt[PROMPT_ID_KEY] = f"{prompt_id}/{self._tries[prompt_id]}"
            self._issued[id(prompt)] = prompt, prompt_id
        return prompt

    def _dataset_index(self, prompt_id: int) -> int:
        epoch, i = divmod(prompt_id, self.num_prompts)
        if epoch != self._epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            self._shuffled, self._epoch = list(self._sampler), epoch
        return self._shuffled[i]

    def _end(self, prompt: Any, again: bool, has_failed: bool) -> int | None:
        with self._lock:
            if id(prompt) not in self._issued:
                return None
            _, prompt_id = self._issued.pop(id(prompt))
            self._tries[prompt_id] += has_failed
            if again and self._tries[prompt_id] < MAX_TRIES:
                self._again.append(prompt_id)
                return prompt_id
            self._unfinished.discard(prompt_id)
            self._tries.pop(prompt_id, None)
        if again:
            logger.error(
                f"prompt {prompt_id} is given up: {MAX_TRIES} rollouts of it failed"
            )
        return prompt_id
