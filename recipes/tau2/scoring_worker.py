"""Process that scores episodes: one JSON request a line in, one JSON answer a line out.

Started by `rewards.RewardPool`; ends when its standard input closes, so also when the
process that started it is gone.

    {"domain": ..., "task_id": ..., "termination": ..., "messages": [...]}
    {"reward": 1.0}  or  {"error": "ValueError: ..."}
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tau2 or a library prints must not be taken for an answer
    from recipes.tau2.scoring import score

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, float | str] = {
                "reward": score(
                    request["domain"],
                    request["task_id"],
                    request["termination"],
                    request["messages"],
                )
            }
        except Exception as error:  # the evaluator's, about this episode; reported
            answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
