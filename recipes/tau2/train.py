"""The command `python -m recipes.tau2.train`, hence a module of its own.

Like `areal_dta.launch`, but says at once if tau2 is not installed:

    python -m recipes.tau2.train --config tau2_smoke.yaml
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from areal_dta import launch
from recipes.tau2.domains import INSTALL_HINT


def main(argv: Sequence[str] | None = None) -> int:
    if find_spec("tau2") is None:
        print(f"tau2 is not installed: {INSTALL_HINT}", file=sys.stderr)
        return 2
    return launch.main(argv)


if __name__ == "__main__":
    sys.exit(main())
