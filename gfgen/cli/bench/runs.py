"""The runs of `gfgen bench compare`: policies in virtual time or on workers, and stock diffusers."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from gfgen.bench.policy_comparison import PolicyRun, attempt, simulated_run
from gfgen.bench.stock import is_stock, run_stock, stock_options
from gfgen.bench.stock_worker import StockRanks
from gfgen.bench.traces import parse_map, read_trace
from gfgen.bench.workloads import (
    Name,
    StandAlone,
    WorkloadOptions,
    admitted,
    alone_s,
    calibration_jobs,
    jobs_with,
    load_compared,
    make_workload,
    models_of,
    weightless_model,
    workload_of,
)
from gfgen.cli.shown.prediction import choose_profile
from gfgen.cli.shown.progress import FailureProgress
from gfgen.errors import InputError, InterruptedRunError, WorkerError
from gfgen.job.spec import JobSpec
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import ResolvedModel, admit
from gfgen.runtime.core.metrics import Summary
from gfgen.runtime.core.observer import JobOutcome
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.simulation import OutcomeRecorder
from gfgen.session.ranks import Ranks, admitted_on
from gfgen.session.session import Session, SessionOptions
from gfgen.system.wording import named

WARM_UP_STEPS = 3
"""Later steps launch nothing else."""


@dataclass(frozen=True, slots=True)
class Predicted:
    specs: tuple[JobSpec, ...]
    model: ResolvedModel
    profile: Profile


def predicted(name: Name, model: str, options: WorkloadOptions, path: Path | None) -> Predicted:
    """The jobs of a workload, from the times of the models' classes alone by the profile."""
    models, most = models_of(model), max(options.num_ranks, options.deadlines_from)
    jobs = [job for each in models for job in admitted(calibration_jobs(each), weightless_model(each))]
    profile = choose_profile(path, jobs, num_ranks=most)
    return Predicted(workload_of(name, model, profile, options), weightless_model(models[0]), profile)


def traced(
    path: Path, maps: Sequence[str], options: WorkloadOptions, profile_path: Path | None
) -> tuple[Sequence[JobSpec], Counter[str]]:
    """The jobs of a public trace, with deadlines by the profile, and the requests that are not mapped."""
    found, unmapped = read_trace(path, dict(map(parse_map, maps)), steps=options.steps)
    until_s = math.inf if options.minutes is None else 60 * options.minutes
    found = [each for each in found if each[0].arrival_s <= until_s][: options.num_jobs]
    if not found:
        raise InputError(f"--arrivals {path}: no request is mapped; there are {kinds_of(unmapped)}")
    specs = [spec for spec, _ in found]
    jobs, problems = admit(specs, default_model="", find_model=weightless_model)
    if problems:
        raise InputError(f"--arrivals {path}: {problems[0]}")
    if any(slack is not None for _, slack in found):
        costs = CostModel(choose_profile(profile_path, jobs, num_ranks=options.deadlines_from))
        alone = [alone_s(job, costs, degree=options.deadlines_from) for job in jobs]
        specs = [
            spec if slack is None else replace(spec, deadline_s=round(slack * taken_s, 3))
            for (spec, slack), taken_s in zip(found, alone, strict=True)
        ]
    return specs, unmapped


def kinds_of(kinds: Counter[str]) -> str:
    return named([f"{kind} ({number})" for kind, number in kinds.most_common()], "kind")


def simulated(texts: Sequence[str], workload: Predicted, *, num_ranks: int) -> Iterator[PolicyRun]:
    for text in texts:
        jobs = jobs_with(workload.specs, load_compared(text)[1], workload.model)
        yield simulated_run(text, jobs, workload.profile, num_ranks=num_ranks)


@contextmanager
def started_workers(
    model: str, ranks: Ranks, output: Path, profile: Profile | None, *, steps: int | None
) -> Iterator[StartedWorkers]:
    """One pool for many runs of a model, whose files are removed. Raises: InputError for a model or ranks."""
    names, known = models_of(model), ranks.admission(model).models
    examples = [spec for name in names for spec in calibration_jobs(name, steps=steps)]
    jobs = admitted_on(ranks, examples, default_model=names[0], source="--model")
    with tempfile.TemporaryDirectory(prefix="files-", dir=output) as folder:
        asked = SessionOptions(
            output_dir=Path(folder), ranks=ranks, policy=load_policy("auto"), model=names[0]
        )
        with Session(asked) as session:
            session.load(jobs, are_all_needed=True)
            yield StartedWorkers(tuple(map(known.find, names)), model, session, profile)


def on_workers(
    texts: Sequence[str],
    name: Name,
    model: str,
    options: WorkloadOptions,
    output: Path,
    ranks: Ranks,
    workload: Predicted | None,
) -> Iterator[PolicyRun]:
    """All policies on one pool, then stock diffusers; without a profile, classes are measured first."""
    policies = [text for text in texts if not is_stock(text)]
    specs: Sequence[JobSpec] = ()
    profile: Profile | None = None
    if workload is not None:
        specs, profile = workload.specs, workload.profile
    if policies or not specs:
        with started_workers(model, ranks, output, profile, steps=options.steps) as bench:
            if specs:
                bench.warm_up(specs, steps=WARM_UP_STEPS)
            else:
                specs = make_workload(name, model, bench.measured_times(options), options)
            for text in policies:
                yield attempt(text, partial(bench.run, text, specs))
    for text in filter(is_stock, texts):
        yield run_outside(text, specs, model, ranks, output)


def run_outside(text: str, specs: Sequence[JobSpec], model: str, ranks: Ranks, output: Path) -> PolicyRun:
    """The jobs on stock diffusers."""
    found = ranks.admission(model).models.find(model)
    stock_ranks = StockRanks(
        found.checkpoint,
        ranks.num_ranks,
        ranks.devices.kind,
        has_random_weights=ranks.has_random_weights,
        vae_dtype=ranks.vae_dtype,
    )
    with tempfile.TemporaryDirectory(prefix="files-", dir=output) as folder:
        try:
            outcomes, way = run_stock(
                admitted(specs, found),
                stock_options(text),
                stock_ranks,
                folder=Path(folder),
                tell=lambda line: click.echo(line, err=True),
            )
        except WorkerError as error:
            return PolicyRun(text, error=str(error))
    return PolicyRun(text, outcomes, note=f"{text}: {way}")


@dataclass(frozen=True, slots=True)
class StartedWorkers:
    _models: tuple[ResolvedModel, ...]
    _name: str
    _session: Session
    _profile: Profile | None

    def run(self, text: str, specs: Sequence[JobSpec]) -> tuple[Sequence[JobOutcome], Summary]:
        policy, varied = load_compared(text)
        watch, jobs = OutcomeRecorder(), jobs_with(specs, varied, *self._models)
        with tempfile.TemporaryDirectory(dir=self._session.options.output_dir) as folder:
            options = replace(self._session.options, output_dir=Path(folder), policy=policy)
            summary = self._session.run(
                jobs, options=options, observers=[FailureProgress(), watch], profile=self._profile
            )
        if (number := self._session.signal_number) is not None:
            raise InterruptedRunError("stopped", signal_number=number)
        return watch.outcomes, summary

    def warm_up(self, specs: Sequence[JobSpec], *, steps: int) -> None:
        """Run a short job of each class and length of prompt on each rank, each pair of ranks, and all."""
        examples = {(spec.model, spec.tag, len(spec.prompt.split())): spec for spec in specs}.values()
        num_ranks = self._session.options.ranks.num_ranks
        for degree in sorted({1, min(2, num_ranks), num_ranks}):
            text, copies = f"legacy,degree={degree}", num_ranks // degree
            jobs = [
                replace(spec, id=f"{number}-{copy}", steps=steps, arrival_s=0.0)
                for number, spec in enumerate(examples)
                for copy in range(copies)
            ]
            self.run(text, jobs)

    def measured_times(self, options: WorkloadOptions) -> StandAlone:
        """Measure each class on one rank while the others work, and on more ranks if deadlines need it."""
        by_degree = {}
        for degree in sorted({1, options.deadlines_from}):
            copies = options.num_ranks if degree == 1 else 1
            taken_s: dict[str, list[float]] = defaultdict(list)
            for repeat in range(2):  # the first time warms up
                jobs = calibration_jobs(self._name, copies=copies, steps=options.steps)
                outcomes, _ = self.run(f"legacy,degree={degree}", jobs)
                for outcome in outcomes if repeat else ():
                    taken_s[outcome.info.spec.tag or ""].append(outcome.busy_s)
            by_degree[degree] = {tag: statistics.median(values) for tag, values in taken_s.items()}
        return by_degree
