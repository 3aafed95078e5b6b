"""Many jobs over many LoRAs, and the share of the ranks' time that switches take.

    python -m benchmarks.lora_jobs make FOLDER [--jobs 300] [--loras 20] [--deadlines 60,120] [--size 64x64]
    gfgen simulate FOLDER/jobs.jsonl --ranks 4 --policy srtf -o OUT
    gfgen run FOLDER/jobs.jsonl --ranks 4 --policy srtf -o OUT --trace OUT/trace.json
    python -m benchmarks.lora_jobs share OUT/trace.json FOLDER/jobs.jsonl

The LoRAs are copies of jobs/outlines.safetensors with scaled factors. A switch is a step whose rank ran its
last step with another LoRA. It costs its duration less the median of steps on such a layout without a switch.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file

EXAMPLE = Path("jobs/outlines.safetensors")


def make(options: argparse.Namespace) -> None:
    """Write a job file with LoRAs drawn at random, next to the files of the LoRAs."""
    folder, rng = Path(options.folder), Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    factors = load_file(EXAMPLE)
    for idx in range(options.loras):
        save_file({name: each * (1 + idx / 100) for name, each in factors.items()}, _file(folder, idx))
    lines = []
    for idx in range(options.jobs):
        job: dict[str, Any] = {"id": f"job-{idx}", "prompt": f"a red circle {idx}", "size": options.size}
        job |= {"frames": 1, "steps": 4, "lora": [{"path": _file(folder, rng.randrange(options.loras)).name}]}
        if options.deadlines:
            job["deadline"] = int(rng.choice(options.deadlines.split(",")))
        lines.append(json.dumps(job) + "\n")
    (folder / "jobs.jsonl").write_text("".join(lines))


def share(options: argparse.Namespace) -> None:
    """Print what switches took in a run or a simulation."""
    loras = {job["id"]: job["lora"][0]["path"] for job in map(json.loads, _lines(options.jobs))}
    entries = [json.loads(line.strip(" ,")) for line in _lines(options.trace) if '"ph": "X"' in line]
    tasks = sorted((each for each in entries if "dispatch" in each["args"]), key=lambda each: each["ts"])
    held: dict[int, str] = {}
    usual, switches = defaultdict(list), []
    for task in tasks:
        rank, lora = task["tid"], loras[task["args"]["job"]]
        if task["cat"] != "denoise":
            continue
        degree = len(task["args"]["ranks"])
        if held.get(rank) == lora:
            usual[degree].append(task["dur"])
        else:
            switches.append((degree, task["dur"]))
        held[rank] = lora
    medians = {degree: statistics.median(durations) for degree, durations in usual.items()}
    busy_s = sum(task["dur"] for task in tasks) / 1e6
    cost_s = sum(max(0.0, duration - medians.get(degree, 0.0)) for degree, duration in switches) / 1e6
    ended_s = max(task["ts"] + task["dur"] for task in tasks) / 1e6
    print(f"{len(switches)} switches, {cost_s:.1f} s of {busy_s:.1f} s busy: {cost_s / busy_s:.1%}; ", end="")
    print(f"{ended_s:.1f} s from start to end")


def _file(folder: Path, idx: int) -> Path:
    return folder / f"{idx}.safetensors"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(required=True)
    making = actions.add_parser("make")
    making.add_argument("folder")
    making.add_argument("--jobs", type=int, default=300)
    making.add_argument("--loras", type=int, default=20)
    making.add_argument("--deadlines", default="", help="seconds, of which each job draws one")
    making.add_argument("--size", default="64x64")
    making.set_defaults(act=make)
    showing = actions.add_parser("share")
    showing.add_argument("trace")
    showing.add_argument("jobs")
    showing.set_defaults(act=share)
    options = parser.parse_args()
    options.act(options)


if __name__ == "__main__":
    main()
