"""Measure the profile of the built-in model that is scaled to other CPUs (gfgen/models/profiles/scaled).

    python -m benchmarks.cpu_profile -o gfgen/models/profiles/scaled/shapes.json

One process, one core. All times are CPU times, in proportion to those of the calibration at that moment, so
other programs on the machine hardly change them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.models.families.calibration import median_s
from gfgen.models.families.registry import load_adapter
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import CPU, Devices
from gfgen.runtime.predict.profile_file import Profile, ProfileRow
from gfgen.session.ranks import Ranks, admitted_on
from gfgen.system.machine import cpu_name, versions

MODEL = "shapes"
SIZES = ((128, 128, 1), (192, 128, 1), (128, 128, 17), (192, 128, 17), (128, 128, 33), (192, 128, 33))
STEPS, JOBS = 4, 3
MOST_RANKS = 8
CALIBRATION_S = 0.08
"""Rows are as on a core on which the calibration takes this long; it is run before and after each job."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    jobs = admitted_on(
        Ranks(Devices(CPU, 1)), [_spec(size) for size in SIZES], default_model=MODEL, source="SIZES"
    )
    adapter = load_adapter(jobs[0].checkpoint)
    profile = Profile(
        device=f"one of {cpu_name()}",
        date=time.strftime("%Y-%m-%d"),
        source="python -m benchmarks.cpu_profile: CPU time of one process on one core",
        num_ranks=MOST_RANKS,
        rows=tuple(row for job in jobs for row in _rows(adapter, job)),
        write_s=0.05,
        dispatch_s=0.002,
        versions=versions(),
        calibration_s=CALIBRATION_S,
    )
    output.write_text(profile.as_json())


def _spec(size: tuple[int, int, int]) -> JobSpec:
    width, height, frames = size
    prompt = "a red circle moves to the right on a blue background"
    return JobSpec(
        id="x".join(map(str, size)), prompt=prompt, model=MODEL, width=width, height=height, frames=frames,
        steps=STEPS, seed=0,
    )  # fmt: skip


def _rows(adapter: Any, job: AdmittedJob) -> list[ProfileRow]:
    found: dict[Stage, list[float]] = {stage: [] for stage in Stage}
    for number in range(JOBS + 1):
        prompt = f"{job.shape} {number} {job.spec.prompt}"  # prompts are encoded once
        before_s = median_s()
        times = _job_s(adapter, replace(job.spec, prompt=prompt))
        speed = CALIBRATION_S / statistics.fmean([before_s, median_s()])
        if number:  # the first one allocates
            for stage in Stage:
                found[stage] += [seconds * speed for seconds in times[stage]]
    print(job.shape, {str(stage): round(statistics.median(values), 4) for stage, values in found.items()})
    return [
        ProfileRow(
            model=MODEL,
            shape=job.shape,
            stage=stage,
            degrees=(1, 1, 1),
            seconds=round(statistics.median(values), 6),
            num_samples=len(values),
            flops=job.flops[stage],
            state_bytes=job.state_bytes,
            basis="scaled",
        )
        for stage, values in found.items()
    ]


@torch.no_grad()
def _job_s(adapter: Any, spec: JobSpec) -> dict[Stage, list[float]]:
    encode_s, prompt = _timed(lambda: adapter.encode(spec))
    prepare_s, (condition, latents) = _timed(lambda: adapter.prepare(spec, prompt))
    steps_s = []
    for step in range(STEPS):
        step_s, latents = _timed(partial(adapter.denoise, spec, prompt, condition, latents, step=step))
        steps_s.append(step_s)
    decode_s, _ = _timed(lambda: adapter.decode(spec, latents))
    ends = {Stage.ENCODE: [encode_s], Stage.PREPARE: [prepare_s], Stage.DECODE: [decode_s]}
    return {**ends, Stage.DENOISE: steps_s}


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began_s = time.process_time()
    result = work()
    return time.process_time() - began_s, result


if __name__ == "__main__":
    main()
