"""Small random checkpoints of diffusers' classes, for trials; made by tests/small_checkpoints.py.

python -m benchmarks.small_checkpoints DIR [NAME...]
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    runpy.run_module("small_checkpoints", run_name="__main__")
