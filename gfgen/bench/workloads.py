"""Workloads for comparisons of policies, generated from a seed: job classes S, M and L of a model.

The arrival rate makes single-rank replicas busy for the share `load` of the time.
Source: GF-DiT (arXiv 2606.13501), evaluation: classes, alpha, time-outs, the client's allowance.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gfgen.errors import InputError, PolicyError
from gfgen.job.fields import FIELDS, Refused
from gfgen.job.shared import number_of
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.session.admission import find_weightless

Name = Literal["short", "foreground-burst", "steady", "overnight"]
WORKLOADS: tuple[Name, ...] = ("short", "foreground-burst", "steady", "overnight")
BURST_SIZES = (4, 12)
"""Short jobs per burst, at least and at most."""
BURST_GAP_S = 0.1
"""Mean time between two jobs of a burst."""
BLOCK = 20
"""Each block of this many jobs of `steady` has the exact share of every class."""
OVERNIGHT_WITH_DEADLINE = 0.2
SUBJECTS = ("a harbour", "a paper kite", "an old tram", "a glass city", "two herons", "a night market")
SETTINGS = ("at dawn", "in heavy rain", "seen from above", "in thick fog", "under lanterns", "in winter")


@dataclass(frozen=True, slots=True)
class JobClass:
    tag: str
    share: float
    alpha: float
    """Deadline / time of the job alone."""
    width: int
    height: int
    frames: int | None = None


@dataclass(frozen=True, slots=True)
class Mix:
    classes: tuple[JobClass, ...]
    steps: int
    timeout_s: float
    slack_s: float
    """The client accepts results this long after the deadline; policies do not see it."""
    guidance: Mapping[str, float | str]


_VIDEO_GUIDANCE: Mapping[str, float | str] = {"guidance_scale": 5.0}
_IMAGE_GUIDANCE: Mapping[str, float | str] = {"negative_prompt": " ", "true_cfg_scale": 4.0}
_SHARES = (0.60, 0.25, 0.15)
_ALPHAS = {"video": (2.0, 2.5, 3.5), "image": (1.5, 2.0, 6.0)}


def _classes(kind: str, *sizes: tuple[int, ...]) -> tuple[JobClass, ...]:
    rows = zip("SML", _SHARES, _ALPHAS[kind], sizes, strict=True)
    return tuple(JobClass(tag, share, alpha, *size) for tag, share, alpha, size in rows)


MIXES = {
    "wan2.2-ti2v-5b": Mix(
        _classes("video", (832, 480, 49), (832, 480, 81), (1280, 704, 81)), 25, 3600, 5, _VIDEO_GUIDANCE
    ),
    "qwen-image": Mix(
        _classes("image", (512, 512), (1024, 1024), (1536, 1536)), 25, 1500, 1, _IMAGE_GUIDANCE
    ),
    "shapes": Mix(_classes("video", (128, 128, 1), (128, 128, 17), (192, 128, 33)), 6, 3600, 1, {}),
    "tiny-wan": Mix(
        _classes("video", (64, 64, 5), (96, 64, 9), (128, 96, 17)), 6, 3600, 0.25, _VIDEO_GUIDANCE
    ),
    "tiny-qwen-image": Mix(_classes("image", (64, 64), (96, 96), (160, 160)), 6, 1500, 0.1, _IMAGE_GUIDANCE),
}
"""By model. Built-in models have jobs of a few seconds on CPU ranks, and less slack."""


def mix_of(model: str, *, steps: int | None = None) -> Mix:
    """The mix, with its own or other steps. Raises InputError for a model without a mix."""
    if model not in MIXES:
        raise InputError(f"--model {model}: no workload is defined for it; there are {', '.join(MIXES)}")
    return MIXES[model] if steps is None else replace(MIXES[model], steps=steps)


StandAlone = Mapping[int, Mapping[str, float]]
"""By degree and class: how long a job takes alone."""


def calibration_jobs(model: str, *, copies: int = 1, steps: int | None = None) -> tuple[JobSpec, ...]:
    mix, rng = mix_of(model, steps=steps), random.Random(0)
    return tuple(
        replace(spec_of(f"{cls.tag}-{number}", cls, mix, model, rng), seed=number)
        for cls in mix.classes
        for number in range(copies)
    )


def stand_alone(
    model: ResolvedModel, costs: CostModel, *, degrees: Sequence[int] = (1, 4), steps: int | None = None
) -> StandAlone:
    jobs = admitted(calibration_jobs(model.name, steps=steps), model)
    return {n: {job.spec.tag or "": alone_s(job, costs, degree=n) for job in jobs} for n in degrees}


def alone_s(job: AdmittedJob, costs: CostModel, *, degree: int) -> float:
    cost_class, trajectory = costs.class_of(job), job.trajectory
    degrees = costs.arrangement(cost_class).steps[degree - 1]
    return costs.remaining_s(cost_class, trajectory.task(0), trajectory.num_tasks, degrees)


def weightless_model(name: str) -> ResolvedModel:
    mix_of(name)
    return find_weightless(name)


def models_of(text: str) -> list[str]:
    """One model, or several joined by '+', whose jobs are mixed. Raises InputError for one without a mix."""
    models = list(dict.fromkeys(text.split("+")))
    for model in models:
        mix_of(model)
    return models


def admitted(specs: Sequence[JobSpec], *models: ResolvedModel) -> tuple[AdmittedJob, ...]:
    """Jobs of these models; with one model alone, whatever its name."""
    found = {model.name: model for model in models}
    find_model = (lambda _: models[0]) if len(models) == 1 else found.__getitem__
    jobs, problems = admit(specs, default_model=models[0].name, find_model=find_model)
    assert not problems, problems
    return tuple(jobs)


VARIED = FIELDS["reuse"]
"""The field that a policy's text may set for all jobs."""


def load_compared(text: str) -> tuple[NamedPolicy, Any]:
    """A policy, and the field of its jobs, `reuse`, which stands at the end. Raises: PolicyError."""
    name, found, value = text.partition(f",{VARIED.name}=")
    try:
        varied = VARIED.parse(number_of(value)) if found else None
    except Refused:
        raise PolicyError(f"--policy {text}: {VARIED.name}, which comes last, is {VARIED.accepted}") from None
    return load_policy(name), varied


def jobs_with(specs: Sequence[JobSpec], varied: Any, *models: ResolvedModel) -> tuple[AdmittedJob, ...]:
    """Admit the jobs with this value of VARIED. Raises InputError if a model or their steps refuse it."""
    specs = [replace(spec, **{VARIED.name: varied}) for spec in specs]
    found = {model.name: model for model in models}
    jobs, problems = admit(specs, default_model="", find_model=lambda name: found.get(name, models[0]))
    if problems:
        raise InputError(f"--policy ...,{VARIED.name}={varied}: {problems[0]}")
    return tuple(jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    load: float = 0.8
    """Share of the throughput of single-rank replicas."""
    seed: int = 1
    num_jobs: int = 100
    num_ranks: int = 4
    deadlines_from: int = 1
    """Deadlines are multiples of the time of a job alone on this many ranks."""
    timeout_s: float | None = None
    """Replaces that of the mix."""
    minutes: float | None = None
    """No job arrives later than this."""
    steps: int | None = None
    """Replaces that of the mix."""


def workload_of(name: Name, text: str, profile: Profile, options: WorkloadOptions) -> tuple[JobSpec, ...]:
    """The jobs of one model or, at equal shares of the load, of several, by arrival."""
    models, degrees = models_of(text), sorted({1, options.deadlines_from})
    own, jobs = replace(options, load=options.load / len(models)), list[JobSpec]()
    for place, model in enumerate(models):
        times = stand_alone(weightless_model(model), CostModel(profile), degrees=degrees, steps=options.steps)
        found = make_workload(name, model, times, own)
        jobs += found if len(models) == 1 else [replace(job, id=f"{job.id}-{place}") for job in found]
    return tuple(sorted(jobs, key=lambda job: job.arrival_s)[: options.num_jobs])


def make_workload(name: Name, model: str, times: StandAlone, options: WorkloadOptions) -> tuple[JobSpec, ...]:
    """The jobs by arrival. Equal arguments give equal jobs on any machine."""
    mix = mix_of(model, steps=options.steps)
    rng = random.Random(f"{name} {model} {options.seed}")
    # At this rate, single-rank replicas are busy for the share `load` of the time.
    rate = options.load * options.num_ranks / sum(cls.share * times[1][cls.tag] for cls in mix.classes)
    until_s = math.inf if options.minutes is None else 60 * options.minutes
    endless = itertools.takewhile(lambda arrival: arrival[0] <= until_s, _ARRIVALS[name](rng, mix, rate))
    arrivals = itertools.islice(endless, options.num_jobs)
    jobs = []
    for number, (arrival_s, cls) in enumerate(sorted(arrivals, key=lambda arrival: arrival[0]), start=1):
        spec = spec_of(f"{cls.tag}-{number:04d}", cls, mix, model, rng)
        deadline_s = cls.alpha * times[options.deadlines_from][cls.tag]
        jobs.append(
            replace(
                spec,
                arrival_s=round(arrival_s, 3),
                deadline_s=round(deadline_s, 3),
                timeout_s=options.timeout_s or mix.timeout_s,
                seed=number,
            )
        )
    if name == "overnight":
        return _with_some_deadlines(jobs, rng, times, options)
    return tuple(jobs)


def _with_some_deadlines(
    jobs: Sequence[JobSpec], rng: random.Random, times: StandAlone, options: WorkloadOptions
) -> tuple[JobSpec, ...]:
    """Give a fifth of the jobs a deadline during the night; the others have none."""
    night_s = sum(times[1][job.tag or ""] for job in jobs) / options.num_ranks
    chosen = [rng.random() < OVERNIGHT_WITH_DEADLINE for _ in jobs]
    due_s = [(job.deadline_s or 0.0) + rng.random() * night_s for job in jobs]
    return tuple(
        replace(job, deadline_s=round(due, 3) if is_chosen else None, timeout_s=None)
        for job, due, is_chosen in zip(jobs, due_s, chosen, strict=True)
    )


def spec_of(job_id: str, cls: JobClass, mix: Mix, model: str, rng: random.Random) -> JobSpec:
    return JobSpec(
        id=job_id,
        prompt=f"{rng.choice(SUBJECTS)} {rng.choice(SETTINGS)}",
        model=model,
        width=cls.width,
        height=cls.height,
        frames=cls.frames,
        steps=mix.steps,
        tag=cls.tag,
        **mix.guidance,  # type: ignore[arg-type]
    )


Arrivals = Iterator[tuple[float, JobClass]]


def _short(rng: random.Random, mix: Mix, rate: float) -> Arrivals:
    """Poisson arrivals of mixed classes."""
    now_s = 0.0
    weights = [cls.share for cls in mix.classes]
    while True:
        now_s += rng.expovariate(rate)
        yield now_s, rng.choices(mix.classes, weights)[0]


def _steady(rng: random.Random, mix: Mix, rate: float) -> Arrivals:
    """One job at a random time of each interval, with exact shares of the classes."""
    block = [cls for cls in mix.classes for _ in range(round(BLOCK * cls.share))]
    for number in itertools.count():
        if number % BLOCK == 0:
            rng.shuffle(block)
        yield (number + rng.random()) / rate, block[number % BLOCK]


def _foreground_burst(rng: random.Random, mix: Mix, rate: float) -> Arrivals:
    """Poisson arrivals of long jobs, and bursts of short ones."""
    foreground, *background = mix.classes
    burst_rate = rate * foreground.share / (sum(BURST_SIZES) / 2)
    weights = [cls.share for cls in background]
    long_s = rng.expovariate(rate * sum(weights))
    burst_s = rng.expovariate(burst_rate)
    while True:
        if long_s < burst_s:
            yield long_s, rng.choices(background, weights)[0]
            long_s += rng.expovariate(rate * sum(weights))
            continue
        begin_s = burst_s
        for _ in range(rng.randint(*BURST_SIZES)):
            yield begin_s, foreground
            begin_s += rng.expovariate(1 / BURST_GAP_S)
        burst_s += rng.expovariate(burst_rate)


def _overnight(rng: random.Random, mix: Mix, rate: float) -> Arrivals:
    weights = [cls.share for cls in mix.classes]
    while True:
        yield 0.0, rng.choices(mix.classes, weights)[0]


_ARRIVALS: Mapping[Name, Callable[[random.Random, Mix, float], Arrivals]] = {
    "short": _short,
    "foreground-burst": _foreground_burst,
    "steady": _steady,
    "overnight": _overnight,
}
