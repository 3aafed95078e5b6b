"""Measurements for those who work on gfgen: python -m benchmarks.NAME."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))  # some run what tests run
