"""Scripts import their own packages from the folder that they lie in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
