"""Process that scores episodes and holds environments for other processes.

Reads one JSON request per line and writes one JSON answer per line. `WorkerProcess`
starts it; it ends when its standard input closes, hence also with its parent.

    {"domain": ..., "task_id": ..., "termination": ..., "messages": [...]}
        -> {"reward": 1.0}
    {"op": "open", "environment": 7, "domain": ..., "task_id": ...} -> {}
    {"op": "call", "environment": 7, "call": {...}} -> {"message": {...}}
    {"op": "close", "environment": 7} -> {}

A failure answers {"error": "ValueError: ..."}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

_CLOSES_BETWEEN_COLLECTIONS = 64


class Desk:
    """Answers requests."""

    def __init__(self) -> None:
        self._environments: dict[int, Any] = {}
        self._num_closed = 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request.pop("op", "score")
        result: dict[str, Any] = getattr(self, f"_{operation}")(**request)
        return result

    def _score(self, **episode: Any) -> dict[str, Any]:
        from recipes.tau2.workers.scoring import score

        return {"reward": score(**episode)}

    def _open(self, environment: int, domain: str, task_id: str) -> dict[str, Any]:
        from recipes.tau2.domains import find_domain, find_task
        from recipes.tau2.workers.environments import build_environment

        built = build_environment(find_domain(domain))
        state = find_task(domain, task_id).initial_state
        built.set_state(
            initialization_data=state.initialization_data if state else None,
            initialization_actions=state.initialization_actions if state else None,
            message_history=list(state.message_history or []) if state else [],
        )
        self._environments[environment] = built
        return {}

    def _call(self, environment: int, call: dict[str, Any]) -> dict[str, Any]:
        from recipes.tau2.api import ToolCall

        if environment not in self._environments:
            raise LookupError("the environment was lost when its process ended")
        response = self._environments[environment].get_response(ToolCall(**call))
        return {"message": response.model_dump(mode="json")}

    def _close(self, environment: int) -> dict[str, Any]:
        self._environments.pop(environment, None)
        self._num_closed += 1
        if self._num_closed % _CLOSES_BETWEEN_COLLECTIONS == 0:
            gc.collect()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tau2 or a library prints must not be taken for an answer
    import recipes.tau2.workers.scoring  # noqa: F401  takes seconds; before "ready"

    # Databases are trees without cycles, millions of objects: walking them for garbage
    # would take longer than anything else here.
    gc.disable()
    desk = Desk()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = desk.answer(json.loads(line))
        except Exception as error:  # the evaluator's or a tool's; reported
            answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
