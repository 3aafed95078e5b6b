"""`gfgen simulate` and `gfgen plan`: job files in virtual time."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from gfgen.cli import options as opt
from gfgen.cli.shown import prediction
from gfgen.cli.shown.board import has_cursor
from gfgen.cli.shown.simulated import as_json as plan_as_json
from gfgen.cli.shown.simulated import in_plain_words, table
from gfgen.cluster.simulated import MAX_NODES, NodePlanner, Nodes, simulate_nodes
from gfgen.errors import InputError, OutputError, RunError
from gfgen.job.reader import JobSource
from gfgen.job.shared import closing_at
from gfgen.models.families.precision import Precision
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.runtime.control.decider import FALLBACK
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.files.manifest import MANIFEST_NAME, ManifestWriter, check_own, read_manifest
from gfgen.runtime.files.ownership import check_no_run, is_of_a_run
from gfgen.runtime.files.trace import TraceWriter
from gfgen.runtime.predict.cost import uncertain
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.predict.profile_store import default_path, runs_path
from gfgen.runtime.simulate.planner import Plan, PlanProgress, PlanWindow, RankPlanner
from gfgen.runtime.simulate.simulation import Simulated
from gfgen.runtime.simulate.simulation import simulate as run_simulation
from gfgen.session.admission import admit_weightless, warn_of_passed_deadlines
from gfgen.system.machine import cpu_name
from gfgen.system.wording import counted

TRACE_NAME = "trace.json"
BAR_DELAY_S = 1.0
NO_CHOICE = ("legacy",)
"""Not useful for a batch: the baseline of comparisons."""
ON_NODES = ("auto", "edf", "makespan", "srtf", "triage")
"""Considered for several machines, where every task of each is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    profile_path: Path | None = opt.profile_option()
    model: str = opt.model_option()
    memory: str | None = opt.option(
        'Memory per GPU for weights and jobs, such as "80GB". Models that do not fit take turns. [no limit]',
        metavar="SIZE",
    )
    precision: tuple[str, ...] = opt.option(
        "As for 'gfgen run': fp8 has profiles of its own, and smaller weights. Repeatable.",
        multiple=True,
        metavar="[MODEL=]fp8",
    )
    attention: tuple[str, ...] = opt.option(
        "Attention in fp8, as for 'gfgen run', with profiles of its own. Repeatable.",
        multiple=True,
        metavar="[MODEL=]fp8",
    )

    @property
    def profile(self) -> Path | None:
        """In fp8, by default the one that was measured so on this machine. Raises: InputError."""
        asked = Precision(self.precision, self.attention)
        asked.check_words()
        if self.profile_path is not None or asked == Precision():
            return self.profile_path
        device = asked.named(prediction.gpu_name() or cpu_name())
        found = next((path for path in (default_path(device), runs_path(device)) if path.is_file()), None)
        if found is None:
            raise InputError(f"no profile of {device}; 'gfgen profile' measures it, --profile names another")
        return found

    def room(self, source: JobSource) -> prediction.SimulatedMemory:
        """The admitted jobs, in the memory that they get. Raises: InputError as `admit_weightless`."""
        admitted = admit_weightless(source, default_model=self.model, has_bar=has_cursor(sys.stderr))
        return prediction.SimulatedMemory.of(
            admitted, self.memory, source=source.name, precision=Precision(self.precision, self.attention)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    jobs: opt.JobOptions = opt.group(opt.JobOptions)
    policies: tuple[str, ...] = opt.option(
        "NAME[,option=value...]; 'gfgen policies' lists them. Repeat to compare.",
        "--policy",
        type=opt.A_POLICY,
        multiple=True,
        default=("auto",),
    )
    ranks: tuple[int, ...] | None = opt.option(
        "Numbers of ranks: 4, 1,2,4 or 1..8. [4]", type=prediction.rank_counts, metavar="N"
    )
    nodes: tuple[int, ...] | None = opt.option(
        "Numbers of machines that each have this many ranks (docs/cluster.md). [one]",
        type=prediction.counts_of("nodes", MAX_NODES),
        metavar="N",
    )
    assumed: Assumed = opt.group(Assumed)
    output: Path | None = opt.option(
        "Folder for the simulated manifests and traces.", "-o", type=opt.NamedPath(file_okay=False)
    )
    as_json: bool = opt.flag("Print JSON instead of the table.", "--json")


@click.command()
@opt.takes(given=Arguments)
def simulate(given: Arguments) -> int:
    """Run JOBS in virtual time, and show how each policy performs. Needs no weights and no GPU.

    The simulation uses the scheduler and the policies of a real run. Only task times are predicted.
    """
    opt.configure_log("warning")
    nodes, output, assumed = given.nodes, given.output, given.assumed
    if nodes and (name := opt.given_in(assumed, "memory") or opt.given_in(given, "output")):
        raise click.UsageError(f"{name} goes with one machine; leave out --nodes")
    named = [load_policy(text) for text in dict.fromkeys(given.policies)]
    room = assumed.room(given.jobs.source())
    counts = given.ranks or prediction.default_ranks(assumed.profile, room.jobs)
    profile = prediction.choose_profile(assumed.profile, room.jobs, num_ranks=max(counts))
    now = time.time()  # the same for all policies, since deadlines may be times of day
    warn_of_passed_deadlines(room.jobs, now=now)
    asked = {
        policy.name + _place(num_ranks, counts, num_nodes, nodes): (policy, num_ranks, num_nodes)
        for policy, num_ranks, num_nodes in itertools.product(named, counts, nodes or (None,))
    }
    folders = {name: _folder(output, name, is_only=len(asked) == 1) for name in asked}
    runs, failures = [], []
    with _held(output, folders.values()):
        for name, (policy, num_ranks, num_nodes) in asked.items():
            start: dict[str, Any] = dict(policy=policy, num_ranks=num_ranks, profile=profile, started_at=now)
            try:
                if num_nodes is not None:
                    done = simulate_nodes(room.jobs, num_nodes=num_nodes, **start)
                else:
                    done = _simulate(room, folders[name], **start)
                runs.append((name, done))
            except OutputError:
                raise
            except RunError as error:
                failures.append(f"{name}: {error}")
    on = _machines(counts, nodes)
    _report(runs, profile, on, most=max(counts), room=room, as_json=given.as_json, failures=failures)
    for failure in failures:
        click.echo(f"gfgen: {failure}", err=True)
    if output is not None and runs and not given.as_json:
        click.echo(f"manifests and traces are in {output}/: 'gfgen plot {output}' draws them")
    return 1 if failures else 0


def _place(num_ranks: int, counts: Sequence[int], num_nodes: int | None, nodes: Sequence[int] | None) -> str:
    """What tells this run from others of its policy, such as ' on 4 x 8'."""
    if nodes and len(nodes) > 1:
        return f" on {num_nodes} x {num_ranks}"
    return f" on {num_ranks}" if len(counts) > 1 else ""


def _machines(counts: Sequence[int], nodes: Sequence[int] | None) -> str:
    def several(numbers: Sequence[int], noun: str) -> str:
        *others, last = numbers
        return f"{', '.join(map(str, others))} and {last} {noun}s" if others else counted(last, noun)

    ranks = several(counts, "rank")
    return ranks if nodes is None else f"{several(nodes, 'node')} with {ranks}"


def _simulate(
    room: prediction.SimulatedMemory, folder: Path | None, *, num_ranks: int, **start: Any
) -> Simulated:
    with contextlib.ExitStack() as stack:
        observers: Sequence[Observer] = ()
        if folder is not None:
            (folder / MANIFEST_NAME).unlink(missing_ok=True)
            manifest = ManifestWriter(folder / MANIFEST_NAME, is_simulated=True)
            writers = manifest, TraceWriter(folder / TRACE_NAME, is_simulated=True)
            observers = [stack.enter_context(contextlib.closing(each)) for each in writers]
        start["residency"] = room.residency(num_ranks)
        return run_simulation(
            room.jobs, num_ranks=num_ranks, observers=observers, reads_s=room.reads_s, **start
        )


@contextlib.contextmanager
def _held(output: Path | None, folders: Iterable[Path | None]) -> Iterator[None]:
    """Hold output folders, without earlier simulations. Raises: LockedError; InputError for a real run's."""
    with contextlib.ExitStack() as stack:
        held = [folder for folder in dict.fromkeys([output, *folders]) if folder is not None]
        for folder in held:
            stack.enter_context(hold_folder(folder))
            check_own(folder / MANIFEST_NAME)
            check_no_run(folder)
        earlier = [] if output is None else [output / MANIFEST_NAME, *output.glob(f"*/{MANIFEST_NAME}")]
        for manifest in earlier:  # which must not be compared with this one
            folder = manifest.parent
            if read_manifest(manifest) and (folder in held or not is_of_a_run(folder)):
                with contextlib.nullcontext() if folder in held else hold_folder(folder):
                    manifest.unlink()
                    (folder / TRACE_NAME).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it contains other files, or is held
                    folder.rmdir()
        yield


def _folder(output: Path | None, name: str, *, is_only: bool) -> Path | None:
    if output is None or is_only:
        return output
    return output / re.sub(r"[^\w.=]+", "-", name).strip("-.")


def _report(
    runs: Sequence[tuple[str, Simulated]],
    profile: Profile,
    on: str,
    *,
    most: int,
    room: prediction.SimulatedMemory,
    as_json: bool,
    failures: Sequence[str],
) -> None:
    turns = room.in_words(most, profile)
    found = {doubt for _, run in runs for doubt in run.doubts}
    doubts = uncertain(found, has_writes=profile.has_writes) if runs else None
    if as_json:
        content = {
            "profile": {"device": profile.device, "date": profile.date, "source": profile.source},
            "runs": [
                {"policy": run.policy, "num_ranks": run.num_ranks, "fault": run.summary.policy_fault}
                | {"name": name, **run.summary.as_json()}
                for name, run in runs
            ],
            "memory": turns,
            "doubts": doubts,
            "failures": list(failures),
        }
        click.echo(json.dumps(content, indent=1))
        return
    click.echo(f"{counted(len(room.jobs), 'job')} on {on}, simulated with {prediction.describe(profile)}\n")
    if runs:
        click.echo("\n".join(table([(name, run.summary) for name, run in runs])) + "\n")
    for name, run in runs:
        if run.summary.policy_fault is not None:
            click.echo(f"{name} failed too often ({run.summary.policy_fault}): {FALLBACK} took over\n")
    if turns:
        click.echo(turns)
    if doubts:
        click.echo(f"Uncertain: {doubts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    jobs: opt.JobOptions = opt.group(opt.JobOptions)
    policies: tuple[str, ...] = opt.option(
        "Consider only this policy, NAME[,option=value...]. Repeatable. [all built-in ones except legacy]",
        "--policy",
        type=opt.A_POLICY,
        multiple=True,
    )
    ranks: tuple[int, ...] | None = opt.option(
        "Numbers of ranks: 4, 1,2,4 or 1..8. The plan is for the largest; the others are alternatives. "
        "[4, and all that the profile has]",
        type=prediction.rank_counts,
        metavar="N",
    )
    nodes: Nodes | None = opt.option(
        "Plan for N machines with this many ranks, such as 4x8 or, to name their devices, 4xh200x8, and say "
        "how many of them are enough. [one]",
        type=prediction.nodes_of,
        metavar="NxRANKS",
    )
    at: str | None = opt.option(
        "Start of the run: a time of day (22:00), a delay (90m) or a date (2026-11-21T22:00). [now]",
        metavar="TIME",
    )
    by: str | None = opt.option(
        "When all jobs must be done: the next such time of day after the start (06:00), a time after the "
        "start (8h) or a date (2026-11-22T06:00).",
        metavar="TIME",
    )
    assumed: Assumed = opt.group(Assumed)
    as_json: bool = opt.flag("Print JSON instead of text.", "--json")


@click.command()
@opt.takes(given=PlanArguments)
def plan(given: PlanArguments) -> None:
    """Predict when JOBS are done and which are late, by policy and number of ranks.

    The plan comes from simulations with a profile. It generates nothing.
    """
    opt.configure_log("warning")
    found = planned(given.jobs.source(), given)
    click.echo(json.dumps(found.as_json(), indent=1) if given.as_json else str(found))


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan, and what to know about it."""

    plan: Plan
    profile: Profile
    notes: Mapping[str, str | None]

    def __str__(self) -> str:
        lines = in_plain_words(self.plan, device=prediction.describe(self.profile))
        return "\n".join([*lines, *filter(None, self.notes.values())])

    def as_json(self) -> dict[str, Any]:
        return {**plan_as_json(self.plan), **self.notes}


def planned(source: JobSource, given: PlanArguments) -> FoundPlan:
    """Raises: InputError for jobs, or if no profile can predict them."""
    nodes, ranks, assumed, now = given.nodes, given.ranks, given.assumed, time.time()
    if nodes and (name := opt.given_in(assumed, "memory") or opt.given_in(given, "ranks")):
        raise click.UsageError(f"{name} goes with one machine; leave out --nodes")
    started_at = now if given.at is None else closing_at(given.at, now=now, option="--at")
    by_s = None if given.by is None else closing_at(given.by, now=started_at, option="--by") - started_at
    room = assumed.room(source)
    jobs, policies, path = room.jobs, [load_policy(text).name for text in given.policies], assumed.profile
    if nodes is None:
        num_ranks = max(ranks or prediction.default_ranks(path, jobs))
        profile = prediction.choose_profile(path, jobs, num_ranks=num_ranks)
    else:
        num_ranks, profile = nodes.num_ranks, prediction.profile_of_nodes(path, jobs, nodes)
    on = prediction.machine(profile, jobs, num_ranks=num_ranks)
    window = PlanWindow(started_at, by_s)
    about: dict[str, Any] = dict(jobs=jobs, profile=profile, window=window)
    with _progress() as about["progress"]:
        if nodes is None:
            counts = ranks or range(1, profile.num_ranks + 1)
            usual = [name for name in BUILT_IN if name not in NO_CHOICE]
            usual += [f"srtf,degree={num_ranks}"] if num_ranks > 1 else []
            planner = RankPlanner(residency=room.residency, reads_s=room.reads_s, **about)
            made = planner.plan(policies or usual, num_ranks=num_ranks, rank_counts=counts)
        else:
            made = NodePlanner(nodes=nodes, **about).plan(policies or ON_NODES)
            on = f"{counted(nodes.number, 'node')} of {on}"
    most_shared = None
    if nodes is not None and nodes.num_ranks > profile.num_ranks:
        most = counted(profile.num_ranks, "rank")
        most_shared = f"A step uses at most {most} here: the profile has no times of more."
    notes = {
        "unseen": prediction.unseen_shapes(profile, jobs),
        "most_shared": most_shared,
        "memory": room.in_words(num_ranks, profile),
    }
    return FoundPlan(replace(made, machine=on), profile, notes)


@contextlib.contextmanager
def _progress() -> Iterator[PlanProgress]:
    if not has_cursor(sys.stderr):
        yield lambda what, share: None
        return
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(desc="plan", total=1.0, delay=BAR_DELAY_S, leave=False, bar_format=form) as bar:

        def tell(what: str, share: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(min(share, 1.0 - bar.n))

        yield tell
