"""The picture in README that shows why gfgen exists: the same jobs under legacy, and below it under auto.

    .venv/bin/python docs/figures.py

simulates a burst of pictures by Qwen-Image on 4 H200, which needs no GPU, and writes docs/why.png.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parents[1]
RANKS, WRITERS = 1, 10_000
"""In a trace: the process of ranks and writers, and the first writer."""
POLICIES = ("legacy", "auto")
JOBS = ["foreground-burst", "--model", "qwen-image", "--jobs", "14", "--load", "0.9", "--seed", "4"]


def gfgen(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "gfgen", *map(str, words)], check=True, cwd=ROOT)


def is_of_a_writer(event: dict[str, Any]) -> bool:
    """The profile has no times of writing, so these lanes are empty."""
    return event.get("pid") == RANKS and event.get("tid", 0) >= WRITERS


def why(folder: Path, target: Path) -> None:
    """Both timelines in one picture, of the same width."""
    jobs, profile = folder / "jobs.jsonl", ROOT / "gfgen/models/profiles/h200.json"
    gfgen("bench", "workload", *JOBS, "--profile", profile, "-o", jobs)
    policies = [word for policy in POLICIES for word in ("--policy", policy)]
    gfgen("simulate", jobs, "--ranks", "4", "--profile", profile, *policies, "-o", folder / "runs")
    pictures = []
    for policy in POLICIES:
        trace = json.loads((folder / "runs" / policy / "trace.json").read_text())
        (folder / f"{policy}.json").write_text(json.dumps([x for x in trace if not is_of_a_writer(x)]))
        gfgen("plot", folder / f"{policy}.json", "-o", folder / f"{policy}.png")
        with Image.open(folder / f"{policy}.png") as drawn:
            width, height = drawn.size
            pictures.append(drawn.convert("RGB").resize((1600, round(height * 1600 / width))))
    whole = Image.new("RGB", (1600, sum(each.height for each in pictures)), "white")
    for number, each in enumerate(pictures):
        whole.paste(each, (0, sum(above.height for above in pictures[:number])))
    whole.quantize(64).save(target)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as apart:
        why(Path(apart), ROOT / "docs/why.png")
