"""Write docs/models.md: what the executor does with each type of Transformers.

python scripts/model_table.py            # minutes, one core
python scripts/model_table.py llama gpt2 # print the rows of some types only
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import transformers  # noqa: E402

from tests.executor.model_sweep import CASES, judge  # noqa: E402
from tests.executor.model_table import table, table_row  # noqa: E402


def main(model_types: list[str]) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    verdicts = []
    for case in CASES:
        if not model_types or case.model_type in model_types:
            verdicts.append(judge(case))
            print(table_row(verdicts[-1]), flush=True)
    if not model_types:
        (ROOT / "docs" / "models.md").write_text(table(verdicts))


if __name__ == "__main__":
    main(sys.argv[1:])
