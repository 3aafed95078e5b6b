"""A first run with empty caches, the second one, and compiled diffusers on the same jobs.

    python -m benchmarks.first_run make-jobs mixed -n 40 --seed 91 --to jobs40.jsonl
    python -m benchmarks.first_run run jobs40.jsonl --count 3 --to found.jsonl --limit 560 -- --ranks 4
    python -m benchmarks.first_run replicas jobs40.jsonl --orders file,deadline --to found.jsonl
    python -m benchmarks.first_run make-jobs night --seed 17 --steps 10 --to night60.jsonl
    python -m benchmarks.first_run table found.jsonl

To try it out anywhere: `make-jobs --tiny`, `run ... -- --device cpu --ranks 2`, `replicas --device cpu`.

`make-jobs` draws from a seed: the order of kinds, prompts of 4 to 100 words, and deadlines of 3 to 8 times
the job alone on one rank, by the shipped profile. `run` calls `gfgen run --random-weights`: by default three
pairs, each with a folder of caches (gfgen's, Triton's, Inductor's, CUDA's) that is empty in the first run and
kept for the second. `filled` is an empty folder after `gfgen cache fill`. Times come from trace, journal and
log; latencies and deadlines count from the start of the first task. Each run appends its line to `--to`
when it ends, so that a call may be cut off. Jobs of `night` are all there at the start, a fifth with a
deadline of 3 to 8 times the job alone. `bound_s` is the work of all tasks, each
at the degree that took the fewest rank-seconds in this run, over the ranks, and the shortest write.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gfgen.bench.workloads import alone_s
from gfgen.cli.shown.timeline import Block, read_timeline
from gfgen.errors import GfgenError
from gfgen.job.reader import read_job_stream
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.core.devices import find_gpus
from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_store import shipped_profiles
from gfgen.session.admission import find_weightless
from gfgen.system.machine import cpu_name, versions
from gfgen.system.wording import table_head, table_row

Record = dict[str, Any]

CACHES = {
    "GFGEN_CACHE": "gfgen",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
}
"""Folders of a run's caches, by variable."""
KINDS = {"q512": (512, 512, 1), "q1024": (1024, 1024, 1), "wan480": (832, 480, 49), "wan704": (1280, 704, 81)}
TINY_KINDS = {"q512": (64, 64, 1), "q1024": (96, 96, 1), "wan480": (64, 64, 5), "wan704": (96, 64, 9)}
PRESETS: Mapping[str, Mapping[str, int]] = {
    "mixed": {"q512": 16, "q1024": 11, "wan480": 9, "wan704": 4},
    "night": {"q512": 22, "q1024": 16, "wan480": 14, "wan704": 8},
    "ten": {"q1024": 4, "q512": 4, "wan480": 2},
    **{kind: {kind: 10} for kind in KINDS},
}
"""Jobs of each kind; with another number of jobs, their shares."""
NIGHT_SHARE = 0.2
"""Of the jobs of `night` that have a deadline."""
NUM_WORDS = (4, 100)
WORDS = """a red fox in the snow under cold stars with soft light over old city street small boat on dark
water bright lanterns at night river bridge wide view of mountain forest morning cloud golden sun"""
ENDING_S = 40.0
"""For a run that is stopped."""


# Jobs -------------------------------------------------------------------------------------------


def make_jobs(asked: argparse.Namespace) -> None:
    """Draw the job file of a preset from a seed."""
    rng = random.Random(f"{asked.preset} {asked.seed}")
    shares = PRESETS[asked.preset]
    num_jobs = asked.n or sum(shares.values())
    turns = [((idx + 0.5) / share, kind) for kind, share in shares.items() for idx in range(num_jobs)]
    kinds = [kind for _, kind in sorted(turns)[:num_jobs]]
    rng.shuffle(kinds)
    low, high = NUM_WORDS
    lengths = [round(low * (high / low) ** rng.random()) for _ in range(asked.lengths or num_jobs)]
    prompts = [" ".join(rng.choices(WORDS.split(), k=rng.choice(lengths))) for _ in kinds]
    lines = [_line(asked, idx, *each) for idx, each in enumerate(zip(kinds, prompts, strict=True))]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    is_night = asked.preset == "night"
    if asked.deadlines or is_night or asked.preset == "mixed":
        least, most = map(float, (asked.deadlines or "3,8").split(","))
        for line, alone in zip(lines, alone_of(read_jobs(text)), strict=True):
            if not is_night or rng.random() < NIGHT_SHARE:
                line["deadline"] = f"{rng.uniform(least, most) * alone:.3f}s"
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    asked.to.write_text(f"# python -m benchmarks.first_run {' '.join(sys.argv[1:])}\n{text}")


def _line(asked: argparse.Namespace, idx: int, kind: str, prompt: str) -> Record:
    width, height, frames = (TINY_KINDS if asked.tiny else KINDS)[kind]
    names = ("tiny-qwen-image", "tiny-wan") if asked.tiny else ("qwen-image", "wan2.2-ti2v-5b")
    job: Record = {"id": f"{kind}-{idx:03}", "model": names[frames > 1], "prompt": prompt, "seed": idx}
    job |= {"size": f"{width}x{height}", "steps": asked.steps or (4 if asked.tiny else 20)}
    job |= {"reuse": asked.reuse} if asked.reuse else {}
    if frames > 1:
        return {**job, "frames": frames, "guidance_scale": 1.0 if asked.no_guidance else 5.0}
    return job | (
        {"true_cfg_scale": 1.0} if asked.no_guidance else {"negative_prompt": " ", "true_cfg_scale": 4.0}
    )


def read_jobs(text: str) -> Sequence[AdmittedJob]:
    parsed = read_job_stream(io.BytesIO(text.encode()), source="the jobs", folder=Path())
    jobs, problems = admit(parsed.specs, default_model="shapes", find_model=find_weightless)
    assert not (found := (*parsed.problems, *problems)), found
    return jobs


def alone_of(jobs: Sequence[AdmittedJob]) -> list[float]:
    """Predicted seconds of each on one rank, the same on every machine."""
    costs = CostModel(shipped_profiles()[0])
    return [alone_s(job, costs, degree=1) for job in jobs]


# Records ----------------------------------------------------------------------------------------


def conditions(asked: argparse.Namespace) -> Record:
    gpus, text = find_gpus(), asked.jobs.read_text()
    git = ["git", "describe", "--always", "--dirty"]
    return {
        "jobs": f"{asked.jobs.name} {hashlib.sha256(text.encode()).hexdigest()[:10]}",
        "card": gpus[0].name if gpus else cpu_name(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": os.environ.get("GFGEN_COMMIT")
        or subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def keep_record(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    shown = {key: value for key, value in record.items() if key not in ("versions", "log")}
    print(json.dumps(shown), flush=True)


def scores(jobs: Sequence[AdmittedJob], ended_s: Mapping[str, float], *, origin_s: float) -> Record:
    """What all programs have alike, from the end of each job's file; latencies count from arrivals."""
    arrival_s = {job.job_id: origin_s + job.spec.arrival_s for job in jobs}
    latencies = {job_id: end_s - arrival_s[job_id] for job_id, end_s in ended_s.items()}
    ordered = sorted(latencies.values())
    due_s = {job.job_id: job.spec.deadline_s for job in jobs if job.spec.deadline_s is not None}
    return {
        "num_jobs": len(jobs),
        "num_missing": len(jobs) - len(ended_s),
        "makespan_s": max(ended_s.values()) - origin_s if ended_s else None,
        "mean_s": statistics.mean(ordered) if ordered else None,
        "p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else None,
        "num_deadlines": len(due_s),
        "num_met": sum(job_id in latencies and latencies[job_id] <= due_s[job_id] for job_id in due_s),
    }


# gfgen ------------------------------------------------------------------------------------------


def run(asked: argparse.Namespace) -> None:
    began_s, longest_s = time.monotonic(), 0.0
    for kind, caches in _turns(asked):
        left_s = asked.limit - (time.monotonic() - began_s)
        if left_s < longest_s:
            print(f"{left_s:.0f} s are left, the longest run took {longest_s:.0f}: no other is started")
            return
        record = run_once(asked, caches, kind, limit_s=left_s)
        keep_record(asked.to, record)
        longest_s = max(longest_s, record["command_s"])


def _turns(asked: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    for _ in range(asked.count):
        with tempfile.TemporaryDirectory(prefix="caches-") as made:
            caches = asked.caches or Path(made)
            for kind in asked.kinds.split(","):
                if kind != "kept":
                    shutil.rmtree(caches, ignore_errors=True)
                caches.mkdir(exist_ok=True)
                yield ("kept" if any(caches.iterdir()) else "empty") if kind != "filled" else kind, caches


def run_once(asked: argparse.Namespace, caches: Path, kind: str, *, limit_s: float) -> Record:
    """A run of gfgen, which is stopped after the limit."""
    record: Record = {"what": "gfgen", "policy": asked.policy, "caches": kind, "options": asked.options}
    record |= conditions(asked)
    jobs = read_jobs(asked.jobs.read_text())
    env = {**os.environ, **{name: str(caches / folder) for name, folder in CACHES.items()}}
    gfgen = [sys.executable, "-m", "gfgen"]
    if kind == "filled":
        began_s = time.monotonic()
        models = sorted({job.spec.model or "" for job in jobs})
        subprocess.run([*gfgen, "cache", "fill", *models], env=env, check=True)
        record["fill_s"] = time.monotonic() - began_s
    with tempfile.TemporaryDirectory(prefix="first-run-") as made:
        folder = Path(made)
        command = [*gfgen, "run", str(asked.jobs), "--policy", asked.policy, "--log-json", *asked.options]
        command += ["--trace", str(folder / "trace.json"), "-o", str(folder / "out")]
        command += [] if asked.checkpoints else ["--random-weights"]
        began_at = time.time()
        record["exit_code"] = _call(command, env, folder / "log.jsonl", limit_s=limit_s)
        record["command_s"] = time.time() - began_at
        try:
            record |= measures(folder, jobs, began_at=began_at)
        except (GfgenError, OSError, ValueError) as error:  # it ended before its first step
            record["error"] = f"{error}; {(folder / 'log.jsonl').read_text()[-1000:]}"
        if asked.keep:
            kept = asked.keep / f"{asked.jobs.stem}-{asked.policy.split(',')[0]}-{kind}-{int(began_at)}"
            kept.mkdir(parents=True)
            for name in ("trace.json", "log.jsonl", "out/journal.jsonl", "out/manifest.jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(folder / name, kept)
    return record


def _call(command: Sequence[str], env: Mapping[str, str], log: Path, *, limit_s: float) -> int:
    """The exit code of a command, which is stopped after the limit."""
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file, env=env) as process:
        for wait_s, end in ((limit_s, process.terminate), (ENDING_S, process.kill)):
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                end()
    return process.returncode


def measures(folder: Path, jobs: Sequence[AdmittedJob], *, began_at: float) -> Record:
    """What trace, journal and log of a run tell; times named `to_` count from the command."""
    timeline = read_timeline(folder / "trace.json")
    journal = [json.loads(line) for line in (folder / "out" / JOURNAL_NAME).read_text().splitlines()]
    tasks = timeline.tasks
    steps = [each for each in tasks if each.stage == "denoise"]
    if not steps:
        raise ValueError("no step in the trace")
    ended_s = {each.job_id: each.end_s for each in timeline.writes}
    origin_s, last_s = tasks[0].start_s, max(ended_s.values(), default=tasks[-1].end_s)
    start_s = journal[0]["started_at"] - began_at
    loads_s = [each["load_s"] for each in journal if each.get("event") == "RankLoaded"]
    shape_of = {job.job_id: f"{job.spec.model} {job.shape.partition('+')[0]}" for job in jobs}
    return {
        "num_ranks": timeline.num_ranks,
        **scores(jobs, ended_s, origin_s=origin_s),
        **_from_log(folder / "log.jsonl", began_at),
        "to_first_task_s": start_s + origin_s,
        "to_first_step_s": start_s + steps[0].start_s,
        "to_last_file_s": start_s + last_s,
        "load_models_s": sum(loads_s),
        "loads_s": loads_s,
        "num_shared": sum(number > 1 for number in Counter(each.dispatch for each in steps).values()),
        "busy": sum(each.duration_s for each in tasks) / timeline.num_ranks / (last_s - origin_s),
        "bound_s": _least_work(tasks, shape_of) / timeline.num_ranks
        + min((each.duration_s for each in timeline.writes), default=0.0),
    }


def _from_log(path: Path, began_at: float) -> Record:
    found: Record = {"to_ready_s": None, "warm_up_s": 0.0, "log": []}
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # lines of libraries
            entry = json.loads(line)
            message, seconds = entry["message"], datetime.fromisoformat(entry["time"]).timestamp() - began_at
            if not entry["logger"].startswith("gfgen.cli"):
                found["log"].append(f"{seconds:.2f} {message}")
            if message.startswith("ready after") and found["to_ready_s"] is None:
                found["to_ready_s"] = seconds
            if match := re.match(r"warmed up for .* in ([\d.]+) s", message):
                found["warm_up_s"] += float(match[1])
    return found


def _least_work(tasks: Sequence[Block], shape_of: Mapping[str, str]) -> float:
    """Rank-seconds of all tasks, each as cheap as the median of its stage and shape at the best degree."""
    work: defaultdict[int | None, float] = defaultdict(float)
    for task in tasks:
        work[task.dispatch] += task.duration_s
    found: dict[tuple[str, str], defaultdict[int, list[float]]] = {}
    degrees = Counter(task.dispatch for task in tasks)
    for task in {task.dispatch: task for task in tasks}.values():
        alike = found.setdefault((task.stage, shape_of[task.job_id]), defaultdict(list))
        alike[degrees[task.dispatch]].append(work[task.dispatch])
    return sum(
        sum(map(len, each.values())) * min(map(statistics.median, each.values())) for each in found.values()
    )


# Tables -----------------------------------------------------------------------------------------

MEDIANS = {
    "to_ready_s": "ready",
    "to_first_step_s": "first step",
    "to_last_file_s": "command to last file",
    "makespan_s": "first task to last file",
    "mean_s": "mean latency",
    "p95_s": "P95",
    "warm_up_s": "warm-up",
    "load_models_s": "loads in the run",
    "num_shared": "shared steps",
    "busy": "busy",
    "bound_s": "bound",
}
"""Columns, by their key in records."""


def table(asked: argparse.Namespace) -> None:
    """Print the records of files as Markdown, a table for each machine and job file."""
    records = [json.loads(line) for path in asked.found for line in path.read_text().splitlines()]
    tables: defaultdict[str, defaultdict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for each in records:
        row = " ".join((each["what"], each["policy"], each["caches"], *each["options"]))
        if each.get("num_missing") == 0:
            caption = f"{each['num_ranks']} x {each['card']}, {each['num_jobs']} jobs ({each['jobs']})"
            tables[caption][row].append(each)
        else:
            print(f"Left out: {row}, {each['at']}: {each.get('error') or each.get('num_missing')}\n")
    for caption, rows in tables.items():
        print(f"{caption}. Seconds, medians; last two columns: each run.\n")
        heads = ("", "runs", *MEDIANS.values(), "each makespan", "deadlines met")
        print(table_head(*heads))
        for row, alike in rows.items():
            each_s = " ".join(f"{each['makespan_s']:.1f}" for each in alike)
            met = " ".join(str(each["num_met"]) for each in alike) + f" of {alike[0]['num_deadlines']}"
            cells = (row, len(alike), *(_median(alike, key) for key in MEDIANS), each_s, met)
            print(table_row(*cells))
        whole = [each for alike in rows.values() for each in alike]
        for key in ("at", "commit", "versions"):
            found = {each[key][: 10 if key == "at" else None] for each in whole}
            print(f"\n{'; '.join(sorted(found))}")
        print()


def _median(records: Sequence[Record], key: str) -> str:
    found = [record[key] for record in records if record.get(key) is not None]
    form = {"busy": ".0%", "num_shared": ".0f"}.get(key, ".1f")
    return format(statistics.median(found), form) if found else ""


# Commands ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    making = _command(commands, "make-jobs", make_jobs)
    making.add_argument("preset", choices=PRESETS)
    making.add_argument("-n", type=int, help="jobs, in the preset's shares")
    making.add_argument("--seed", required=True)
    making.add_argument("--steps", type=int)
    making.add_argument("--no-guidance", action="store_true")
    making.add_argument("--deadlines", metavar="LOW,HIGH", help="times the job alone [mixed: 3,8]")
    making.add_argument("--lengths", type=int, help="the most lengths of prompts [any]")
    making.add_argument("--reuse", type=float, help="share of the steps, of each job")
    making.add_argument("--tiny", action="store_true")
    running = _command(commands, "run", run)
    running.add_argument("--policy", default="auto")
    running.add_argument("--count", type=int, default=3)
    running.add_argument("--kinds", default="empty,kept", help="of caches: empty, filled, kept")
    running.add_argument("--caches", type=Path, help="folder of caches that stays [one of its own]")
    running.add_argument("--checkpoints", action="store_true", help="the jobs name some: no random weights")
    running.add_argument("--keep", type=Path, help="folder for traces, journals and logs")
    stock = _command(commands, "replicas", measure)
    stock.add_argument("--orders", default="file", help="of file, longest, deadline, shortest")
    stock.add_argument("--embeddings", choices=("auto", "encoded", "ready"), default="auto")
    stock.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    stock.add_argument("--gpus", type=int, help="processes [all GPUs]")
    stock.add_argument("--vae-dtype", default="auto")
    stock.add_argument("--cache-dit", default="", metavar="WORDS", help="of benchmarks/cache_dit_group.py")
    served = _command(commands, "servers", measure)
    served.add_argument("--server", action="append", required=True, metavar="[MODEL=]URL")
    served.add_argument("--name", required=True, help="of the row, with the version")
    served.add_argument("--gpus", type=int, required=True, help="of the server")
    served.add_argument("--kill", nargs=2, metavar=("SECONDS", "COMMAND"), help="run once, kills a worker")
    served.add_argument("--retries", type=int, default=0, help="of a request that fails")
    for measuring in (running, stock, served):
        measuring.add_argument("jobs", type=Path)
        measuring.add_argument("--limit", type=float, default=3600.0, help="seconds for all [servers: a job]")
    for command in (making, running, stock, served):
        command.add_argument("--to", type=Path, required=True)
    _command(commands, "table", table).add_argument("found", type=Path, nargs="+")
    words = [*sys.argv[1:], "--"]
    own = words[: words.index("--")]
    asked = parser.parse_args(own, argparse.Namespace(options=words[len(own) + 1 : -1]))
    asked.call(asked)


def _command(commands: Any, name: str, call: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name)
    parser.set_defaults(call=call)
    return parser


def measure(asked: argparse.Namespace) -> None:
    importlib.import_module(f"benchmarks.{asked.command}").measure(asked)  # imports torch


if __name__ == "__main__":
    main()
