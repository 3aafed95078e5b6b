"""`auto` beside the other policies on files without deadlines, simulated.

    python -m benchmarks.default_policy

By the profile of H200 that comes with gfgen, with and without a limit of memory. The table says which of the
other policies ends soonest, and has the least mean latency of those that end within 2% of it. `first_run run`
times such files on real ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measured import head, row
from gfgen.bench.workloads import weightless_model
from gfgen.cli.shown.prediction import SimulatedMemory
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob, admit
from gfgen.runtime.predict.profile_file import load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.runtime.simulate.simulation import simulate

SAME_END = 1.02
OTHERS = ("fcfs", "srtf", "edf", "triage,degree=1", "triage,degree=2", "triage,degree=4", "makespan")
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
    profile = load_profile(SHIPPED / "h200.json")
    run = simulate(
        jobs, policy=load_policy(policy), num_ranks=num_ranks, profile=profile, residency=residency
    )
    ends_s = [outcome.ended_s for outcome in run.outcomes]
    return max(ends_s), statistics.mean(ends_s)


def simulated_rows() -> Iterator[str]:
    yield head("file", "GPUs", "`auto`", "soonest end", "least mean latency within 2% of it", "`fcfs`", "")
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
                yield row(f"{name}{', 80 GB' if memory else ''}", num_ranks, *cells(found))


def cells(found: dict[str, tuple[float, float]]) -> Sequence[str]:
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
    return [*times, fcfs, ", ".join(misses)]


if __name__ == "__main__":
    print("\n".join(simulated_rows()))
