"""How long after a stop the rank of a huge step is free again.

    python -m benchmarks.stopping shapes --frames 2001
    python -m benchmarks.stopping wan2.2-ti2v-5b --size 1280x704 --frames 601 --options "--random-weights"

Runs jobs whose steps take far longer than their `timeout`, one after the other on one rank, and reads
from the journal when each timeout came, when the rank was free, and whether it had to be killed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def job_lines(options: argparse.Namespace) -> Iterator[str]:
    """Job i runs for `--seconds` after the one before."""
    for idx in range(options.jobs):
        yield json.dumps(
            {
                "id": f"huge-{idx}",
                "prompt": "a red circle moves up on a blue background",
                "model": options.model,
                "size": options.size,
                "frames": options.frames,
                "steps": 4,
                "arrival": f"{0.01 * idx:.2f}s",
                "timeout": f"{options.first + options.seconds * idx:g}s",
            }
        )


def stops(journal: Path) -> Iterator[tuple[str, float, bool]]:
    """(job, seconds from its timeout until its rank was free, whether that took a kill)."""
    asked_s, job_id, was_killed = 0.0, "", False
    for line in journal.read_text().splitlines():
        event = json.loads(line)
        match event.get("event"):
            case "JobTimedOut":
                asked_s, job_id, was_killed = event["time_s"], event["job_id"], False
            case "RankLost":
                was_killed = True
            case "TaskFailed" if event["void"]:
                yield job_id, event["time_s"] - asked_s, was_killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--size", default="128x128")
    parser.add_argument("--frames", type=int, default=2001)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--first", type=float, default=30.0, help="timeout of the first job, in seconds")
    parser.add_argument("--seconds", type=float, default=20.0, help="more for each further job")
    parser.add_argument("--options", default="", help="for gfgen run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = Path(folder, "jobs.jsonl")
        jobs.write_text("".join(f"{line}\n" for line in job_lines(options)))
        command = [sys.executable, "-m", "gfgen", "run", str(jobs), "--ranks", "1", "--policy", "fcfs"]
        command += ["-o", f"{folder}/out", "--quiet", *shlex.split(options.options)]
        subprocess.run(command, check=False)
        found = list(stops(Path(folder, "out", "journal.jsonl")))
    for job_id, seconds, was_killed in found:
        print(f"{job_id}: free after {seconds:.2f} s{', by a kill' if was_killed else ''}")
    if found:
        seconds_all = [seconds for _, seconds, _ in found]
        print(f"median {statistics.median(seconds_all):.2f} s, most {max(seconds_all):.2f} s of {len(found)}")


if __name__ == "__main__":
    main()
