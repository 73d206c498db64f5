"""What the stages of `tests/unit/paper` make is at hand here, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit" / "paper"))
