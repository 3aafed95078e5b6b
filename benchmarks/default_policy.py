"""`auto` beside the other policies on files without deadlines: simulated, or timed on ranks.

    python -m benchmarks.default_policy simulate
    python -m benchmarks.default_policy rounds
    python -m benchmarks.default_policy gpus --ranks 2 --to found.jsonl
    python -m benchmarks.default_policy gpus --ranks 2 --memory 80GB --only "8 Wan" --to found.jsonl

`simulate` uses the profile of H200 that comes with gfgen, with and without a limit of memory. Its table says
which of the other policies ends soonest, and has the least mean latency of those that end within 2% of it.
`rounds` runs files with the built-in model under each policy in turn, from an empty cache of profiles and
from one with the times of steps that `--alone` and `--pair` give. It prints the median over the rounds of the
ratio of auto's time to each other policy's, from the first task to the last file. `gpus` runs the files that
`simulate` knows with random weights, under the policies in turn: on ranks that stay, or, where models take
turns, on new ranks for each run, with what earlier runs left in the caches. A first run is not counted.
With --tiny it can be tried on CPU ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gfgen.bench.workloads import weightless_model
from gfgen.cli.shown.prediction import SimulatedMemory
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import OutcomeRecorder, simulate
from gfgen.session.ranks import AskedRanks
from gfgen.session.session import Session, SessionOptions

SAME_END = 1.02
OTHERS = ("fcfs", "srtf", "edf", "triage,degree=1", "triage,degree=2", "triage,degree=4", "makespan")
TIMED = ("fcfs", "srtf", "legacy,degree=1")
TINY = {"qwen-image": "tiny-qwen-image", "wan2.2-ti2v-5b": "tiny-wan"}
MIXED, VIDEOS = (512, 1024, 1536, 512), ((832, 480, 49), (832, 480, 81), (1280, 704, 81))


def qwen(number: int, size: int, steps: int = 20) -> JobSpec:
    fields: dict[str, Any] = {"width": size, "height": size, "negative_prompt": " ", "true_cfg_scale": 4.0}
    return JobSpec(id=f"q{number}", prompt="a", model="qwen-image", steps=steps, **fields)


def wan(number: int, width: int, height: int, frames: int, steps: int = 20) -> JobSpec:
    fields: dict[str, Any] = {"width": width, "height": height, "frames": frames, "guidance_scale": 5.0}
    return JobSpec(id=f"w{number}", prompt="a", model="wan2.2-ti2v-5b", steps=steps, **fields)


FILES = {
    "20 Qwen-Image 1024": [qwen(n, 1024) for n in range(20)],
    "20 Qwen-Image 512 to 1536": [qwen(n, MIXED[n % 4]) for n in range(20)],
    "100 Qwen-Image 512 to 1536": [qwen(n, MIXED[n % 4]) for n in range(100)],
    "9 Wan 832x480x49": [wan(n, *VIDEOS[0]) for n in range(9)],
    "9 Wan of three sizes": [wan(n, *VIDEOS[n % 3]) for n in range(9)],
    "8 Wan, 8 Qwen-Image, 8 to 10 steps": [
        job
        for n in range(8)
        for job in (wan(n, 832, 480, (17, 1)[n % 2], 8 + n % 3), qwen(n, (512, 1024)[n % 2], 8 + n % 3))
    ],
    "9 Qwen-Image, 4 Wan": [qwen(n, (512, 1024)[n % 2]) for n in range(9)]
    + [wan(n, *VIDEOS[0]) for n in range(4)],
}


def admitted(specs: Sequence[JobSpec]) -> tuple[AdmittedJob, ...]:
    models = {spec.model or "": weightless_model(spec.model or "") for spec in specs}
    jobs, problems = admit(specs, default_model="qwen-image", find_model=lambda name: models[name])
    assert not problems, problems
    return tuple(jobs)


def end_and_latency_s(
    jobs: Sequence[AdmittedJob], policy: str, *, num_ranks: int, memory: str | None
) -> tuple[float, float]:
    room = None if memory is None else SimulatedMemory.of(jobs, memory, source="a study")
    residency = None if room is None else room.residency(num_ranks)
    named = load_policy(policy)
    run = simulate(
        jobs,
        policy=named,
        num_ranks=num_ranks,
        profile=load_profile(SHIPPED / "h200.json"),
        residency=residency,
    )
    ends_s = [outcome.ended_s for outcome in run.outcomes]
    return max(ends_s), statistics.mean(ends_s)


def simulated_rows() -> Iterator[str]:
    yield "| file | GPUs | `auto` | soonest end | least mean latency within 2% of it | `fcfs` | |"
    yield "|---|---|---|---|---|---|---|"
    for name, specs in FILES.items():
        jobs = admitted(specs)
        memories = (None, "80GB") if len({spec.model for spec in specs}) > 1 else (None,)
        for memory in memories:
            for num_ranks in (1, 2, 4):
                found = {
                    policy: end_and_latency_s(jobs, policy, num_ranks=num_ranks, memory=memory)
                    for policy in (*OTHERS, "auto")
                    if int(policy.partition("degree=")[2] or 1) <= num_ranks
                }
                yield row(f"{name}{', 80 GB' if memory else ''}", num_ranks, found)


def row(name: str, num_ranks: int, found: dict[str, tuple[float, float]]) -> str:
    auto_end_s, auto_s = found.pop("auto")
    soonest, (end_s, _) = min(found.items(), key=lambda item: item[1])
    as_soon = {policy: mean_s for policy, (each_s, mean_s) in found.items() if each_s <= SAME_END * end_s}
    best = min(as_soon, key=as_soon.__getitem__)
    misses = [f"end {auto_end_s / end_s - 1:+.1%}"] if auto_end_s > SAME_END * end_s else []
    misses += [f"latency {auto_s / as_soon[best] - 1:+.1%}"] if auto_s > 1.005 * as_soon[best] else []
    if auto_s > found["fcfs"][1]:
        misses.append(f"latency of fcfs {auto_s / found['fcfs'][1] - 1:+.1%}")
    times = [f"{auto_end_s:.1f} ({auto_s:.1f})", f"{end_s:.1f} `{soonest}`", f"{as_soon[best]:.1f} `{best}`"]
    fcfs = "{:.1f} ({:.1f})".format(*found["fcfs"])
    return f"| {name} | {num_ranks} | {' | '.join(times)} | {fcfs} | {', '.join(misses)} |"


# Two CPU ranks --------------------------------------------------------------------------------


def timed_files(folder: Path) -> dict[str, Path]:
    picture = {"prompt": "a red circle on a blue background", "frames": 1, "size": "64x64"}
    video = {"prompt": "a red circle moves to the left", "frames": 17, "size": "96x64"}
    found = {"13 jobs of jobs/batch.jsonl": Path("jobs/batch.jsonl").resolve()}
    for name, fields, number in (("100 tiny pictures", picture, 100), ("6 videos", video, 6)):
        found[name] = folder / f"{name.replace(' ', '-')}.jsonl"
        lines = [json.dumps({"id": f"job-{n}", "seed": n, **fields}) for n in range(number)]
        found[name].write_text("\n".join(lines) + "\n")
    return found


def run_s(file: Path, policy: str, *, cache: Path, folder: Path) -> float:
    """From the first task to the last file, with a copy of the cache, on two ranks."""
    own, output = folder / "cache", folder / "out"
    for path in (own, output):
        shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(cache, own)
    command = [sys.executable, "-m", "gfgen", "run", str(file), "-o", str(output), "--ranks", "2", "-q"]
    environment = os.environ | {"GFGEN_CACHE": str(own), "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--policy", policy], check=True, env=environment, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()]
    times = [line["timings"] for line in lines]
    return float(max(each["ended_s"] for each in times) - min(each["started_s"] for each in times))


def set_times(cache: Path, *, alone_s: float, pair_s: float) -> None:
    """Give the steps of tiny pictures these times, as a busy machine may have left them."""
    known = {(1, 1, 1): alone_s, (2, 1, 1): pair_s}
    for file in (cache / "profiles").glob("*.json"):
        content = json.loads(file.read_text())
        for each in content["rows"]:
            seconds = known.get(tuple(each["degrees"]))
            if each["shape"] == "64x64x1+cfg" and each["stage"] == "denoise" and seconds is not None:
                each |= {"seconds": seconds, "loaded_s": seconds, "num_samples": 100}
        file.write_text(json.dumps(content))


def rounds(number: int, *, alone_s: float, pair_s: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, empty, kept = timed_files(folder), folder / "empty", folder / "kept"
        empty.mkdir()
        for policy in ("fcfs", "fcfs,degree=2"):
            run_s(files["100 tiny pictures"], policy, cache=kept if kept.exists() else empty, folder=folder)
            shutil.copytree(folder / "cache", kept, dirs_exist_ok=True)
        set_times(kept, alone_s=alone_s, pair_s=pair_s)
        for cache, (what, file) in ((c, each) for c in (empty, kept) for each in files.items()):
            ratios: dict[str, list[float]] = {policy: [] for policy in TIMED}
            for count in range(number):
                order = ("auto", *TIMED) if count % 2 == 0 else (*reversed(TIMED), "auto")
                taken = {policy: run_s(file, policy, cache=cache, folder=folder) for policy in order}
                for policy in TIMED:
                    ratios[policy].append(taken["auto"] / taken[policy])
            words = ", ".join(
                f"{policy} {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
                for policy, each in ratios.items()
            )
            print(f"{what}, {cache.name} profile: auto over {words}", flush=True)


# GPUs -------------------------------------------------------------------------------------------------


def run_on_ranks(session: Session, jobs: Sequence[AdmittedJob], policy: str) -> tuple[float, float]:
    """Makespan and mean latency."""
    watch = OutcomeRecorder()
    with tempfile.TemporaryDirectory(dir=session.options.output_dir) as name:
        options = replace(session.options, output_dir=Path(name), policy=load_policy(policy))
        session.run(jobs, options=options, observers=[watch])
    ends_s = [outcome.ended_s for outcome in watch.outcomes if outcome.status == "done"]
    assert len(ends_s) == len(jobs), watch.outcomes
    return max(ends_s), statistics.mean(ends_s)


def on_gpus(asked: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A result for each run, as it ends, until there is no time for another one as long as the last."""
    ends_s = time.monotonic() + asked.limit
    ranks = AskedRanks(ranks=asked.ranks, memory=asked.memory, random_weights=True).here()
    policies = asked.policies.split()
    for name, specs in FILES.items():
        if not name.startswith(asked.only):
            continue
        if asked.tiny:
            size: dict[str, Any] = {"width": 64, "height": 64, "steps": 3}
            specs = [replace(spec, model=TINY[spec.model or ""], **size) for spec in specs]
        if asked.steps:
            specs = [replace(spec, steps=asked.steps) for spec in specs]
        jobs, problems = ranks.admission("qwen-image")(specs)
        assert not problems, problems
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            options = SessionOptions(
                output_dir=Path(folder), ranks=ranks, policy=load_policy("auto"), keeps_records=False
            )
            session: Session | None = None
            for count in range(asked.rounds + 1):
                for policy in policies if count % 2 else reversed(policies):
                    began_s = time.monotonic()
                    if session is None or asked.memory:
                        stack.close()
                        session = stack.enter_context(Session(options))
                        session.load(jobs)
                    makespan_s, mean_s = run_on_ranks(session, jobs, policy)
                    if count:
                        yield {
                            "file": name,
                            "ranks": ranks.description,
                            "memory": asked.memory,
                            "steps": asked.steps,
                            "policy": policy,
                            "makespan_s": makespan_s,
                            "mean_s": mean_s,
                        }
                    if time.monotonic() + (time.monotonic() - began_s) > ends_s:
                        return
                    if not count and asked.memory:
                        break  # one run fills the caches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("simulate", "rounds", "gpus"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=float, default=0.185, help="Seconds of a step on one rank.")
    parser.add_argument("--pair", type=float, default=0.096, help="And on two.")
    parser.add_argument("--ranks", type=int, help="Of gpus: how many. [all]")
    parser.add_argument("--memory", help="Of gpus: as gfgen run takes it.")
    parser.add_argument("--only", default="", help="Of gpus: how the name of a file begins.")
    parser.add_argument("--limit", type=float, default=560.0, help="Of gpus: seconds for all of it.")
    parser.add_argument("--policies", default="auto fcfs makespan triage,degree=1", help="Of gpus.")
    parser.add_argument("--steps", type=int, help="Of gpus: steps of each job. [those of the file]")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--to", type=Path, help="Of gpus: where a line is appended for each run.")
    options = parser.parse_args()
    if options.what == "gpus":
        for found in on_gpus(options):
            line = json.dumps(found)
            print(line, flush=True)
            if options.to:
                with options.to.open("a") as file:
                    file.write(line + "\n")
    elif options.what == "rounds":
        rounds(options.rounds, alone_s=options.alone, pair_s=options.pair)
    else:
        print("\n".join(simulated_rows()))


if __name__ == "__main__":
    main()
