"""Write the conversations of the picture in docs/inspect.md, with two planted faults.

    python scripts/inspect_example.py example.jsonl
    python -m areal_dta.inspect example.jsonl --html example.html

An agent's conversations about orders: prompts begin with the time, and the tools come
in another order each time. So nothing behind the time is shared between episodes.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

EPISODES, TURNS, SAMPLES = 4, 4, 4
THINGS = "order ticket refund address seat bag".split()
RULES = " ".join(
    f"{number}. Before you change {thing}s, say what will change and what it costs, "
    "and wait for a yes. Never promise what no tool has confirmed."
    for number, thing in enumerate(THINGS, start=1)
)


TOOLS = {
    "find_order": (
        "Look an order up by its number, with its items and state.",
        "number",
    ),
    "cancel_order": ("Cancel what has not left the warehouse yet.", "number"),
    "change_address": ("Send a parcel elsewhere while it is on its way.", "street"),
    "refund": ("Pay money back, to the card it came from.", "amount"),
    "find_customer": ("Find somebody by name and postal code.", "name"),
    "book_courier": ("Have a parcel fetched at the customer's door.", "day"),
    "hand_over": ("Give the conversation to a human, with a summary.", "summary"),
}


def tools() -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {parameter: {"type": "string"}},
                    "required": [parameter],
                },
            },
        }
        for name, (description, parameter) in TOOLS.items()
    ]


def conversation(task: int, sample: int, rng: random.Random) -> dict[str, Any]:
    """Return an episode; the samples of a task have their first question in common."""
    minute = rng.randrange(60)
    text = f"The time is 2026-12-01 09:{minute:02d}. You help customers. {RULES}"
    messages = [{"role": "system", "content": text}]
    for turn in range(TURNS):
        thing = THINGS[(task + turn) % len(THINGS)]
        mood = "" if turn == 0 else rng.choice(("Please. ", "Hm. ", "Now. ", "Well. "))
        messages += [
            {"role": "user", "content": f"{mood}What about {thing} {task}{turn}?"},
            {
                "role": "assistant",
                "content": f"I looked at {thing} {task}{turn}: "
                + rng.choice(("all is well.", "it is late.", "it can be changed."))
                + f" ({sample})",
            },
        ]
    shuffled = tools()
    rng.shuffle(shuffled)
    return {
        "messages": messages,
        "tools": shuffled,
        "task_id": str(task),
        "session_id": f"{task}-{sample}",
    }


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/inspect_example.py FILE")
    rng = random.Random(0)
    rows = [conversation(t, s, rng) for t in range(EPISODES) for s in range(SAMPLES)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    Path(sys.argv[1]).write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
