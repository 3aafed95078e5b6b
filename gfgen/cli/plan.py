"""`gfgen plan`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from tqdm import tqdm

from gfgen.cli.options import (
    A_POLICY,
    JobOptions,
    batch_option,
    configure_log,
    flag,
    group,
    model_option,
    option,
    profile_option,
    simulated_memory_option,
    takes,
)
from gfgen.cli.shown.board import has_cursor
from gfgen.cli.shown.prediction import (
    NodesType,
    RankCounts,
    SimulatedMemory,
    choose_profile,
    default_ranks,
    describe,
    machine,
    profile_of_nodes,
    unseen_shapes,
)
from gfgen.cluster.simulated import NodePlanner, Nodes
from gfgen.job.shared import closing_at
from gfgen.policies.catalog import BUILT_IN, load_policy
from gfgen.runtime.core.admission import check_batch, families_of
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.simulate.plan_report import as_json as plan_as_json
from gfgen.runtime.simulate.plan_report import in_plain_words
from gfgen.runtime.simulate.planner import Plan, PlanProgress, PlanWindow, make_plan
from gfgen.session.admission import admit_weightless
from gfgen.system.wording import counted

BAR_DELAY_S = 1.0
NO_CHOICE = ("legacy",)
"""Not useful for a batch: the baseline of comparisons."""
ON_NODES = ("auto", "edf", "makespan", "srtf", "triage")
"""Considered for several machines, where every task of each is simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Those of the command, in the order of its help."""

    jobs: JobOptions = group(JobOptions)
    policies: tuple[str, ...] = option(
        "Consider only this policy, NAME[,option=value...]. Repeatable. [all built-in ones except legacy]",
        "--policy",
        type=A_POLICY,
        multiple=True,
    )
    ranks: tuple[int, ...] | None = option(
        "Numbers of ranks: 4, 1,2,4 or 1..8. The plan is for the largest; the others are alternatives. "
        "[4, and all that the profile has]",
        type=RankCounts(),
        metavar="N",
    )
    nodes: Nodes | None = option(
        "Plan for N machines with this many ranks, such as 4x8 or, to name their devices, 4xh200x8, and say "
        "how many of them are enough. [one]",
        type=NodesType(),
        metavar="NxRANKS",
    )
    at: str | None = option(
        "Start of the run: a time of day (22:00), a delay (90m) or a date (2026-11-21T22:00). [now]",
        metavar="TIME",
    )
    by: str | None = option(
        "When all jobs must be done: the next such time of day after the start (06:00), a time after the "
        "start (8h) or a date (2026-11-22T06:00).",
        metavar="TIME",
    )
    profile_path: Path | None = profile_option()
    model: str = model_option()
    batch: int = batch_option()
    memory: str | None = simulated_memory_option()
    as_json: bool = flag("Print JSON instead of text.", "--json")


@click.command()
@takes(given=Arguments)
def plan(given: Arguments) -> None:
    """Predict when JOBS are done and which are late, by policy and number of ranks.

    The plan comes from simulations with a profile. It generates nothing.
    """
    configure_log("warning")
    nodes, ranks, path, now = given.nodes, given.ranks, given.profile_path, time.time()
    if nodes and (given.memory or ranks or given.batch > 1):
        name = "--memory" if given.memory else "--ranks" if ranks else "--batch"
        raise click.UsageError(f"{name} goes with one machine; leave out --nodes")
    started_at = now if given.at is None else closing_at(given.at, now=now, option="--at")
    by_s = None if given.by is None else closing_at(given.by, now=started_at, option="--by") - started_at
    source = given.jobs.source()
    admitted = admit_weightless(source, default_model=given.model, has_bar=has_cursor(sys.stderr))
    check_batch(given.batch, families_of(admitted))
    window = PlanWindow(started_at, by_s, given.batch)
    names = [load_policy(text).name for text in given.policies]
    room = SimulatedMemory.of(admitted, given.memory, source=source.name)
    if nodes is None:
        found = _of_one_machine(room, names, ranks, path, window)
    else:
        found = _of_nodes(room, names, nodes, path, window)
    made, profile, turns = found
    unseen = unseen_shapes(profile, admitted)
    most_shared = None if nodes is None else _most_shared(profile, nodes)
    if given.as_json:
        said = {"memory": turns, "most_shared": most_shared, "unseen": unseen}
        click.echo(json.dumps(plan_as_json(made) | said, indent=1))
    else:
        more = filter(None, [unseen, most_shared, turns])
        click.echo("\n".join([*in_plain_words(made, device=describe(profile)), *more]))


_Found = tuple[Plan, Profile, str | None]


def _of_one_machine(
    room: SimulatedMemory,
    policies: Sequence[str],
    ranks: Sequence[int] | None,
    path: Path | None,
    window: PlanWindow,
) -> _Found:
    jobs = room.jobs
    num_ranks = max(ranks or default_ranks(path, jobs))
    profile = choose_profile(path, jobs, num_ranks=num_ranks)
    counts = ranks or range(1, profile.num_ranks + 1)
    with _progress() as progress:
        made = make_plan(
            jobs,
            policies=policies or _usual_policies(num_ranks),
            num_ranks=num_ranks,
            rank_counts=counts,
            profile=profile,
            window=window,
            progress=progress,
            residency=room.residency,
        )
    made = replace(made, machine=machine(profile, jobs, num_ranks=num_ranks))
    return made, profile, room.in_words(num_ranks)


def _of_nodes(
    room: SimulatedMemory, policies: Sequence[str], nodes: Nodes, path: Path | None, window: PlanWindow
) -> _Found:
    jobs = room.jobs
    profile = profile_of_nodes(path, jobs, nodes)
    with _progress() as progress:
        made = NodePlanner(jobs, nodes, profile, window, progress).plan(policies or ON_NODES)
    each = machine(profile, jobs, num_ranks=nodes.num_ranks)
    made = replace(made, machine=f"{counted(nodes.number, 'node')} of {each}")
    return made, profile, room.in_words(nodes.num_ranks)


def _most_shared(profile: Profile, nodes: Nodes) -> str | None:
    if nodes.num_ranks <= profile.num_ranks:
        return None
    return f"A step uses at most {counted(profile.num_ranks, 'rank')} here: the profile has no times of more."


def _usual_policies(num_ranks: int) -> Sequence[str]:
    """The built-in policies, and srtf with groups of all ranks."""
    usual = [name for name in BUILT_IN if name not in NO_CHOICE]
    return usual if num_ranks == 1 else [*usual, f"srtf,degree={num_ranks}"]


@contextlib.contextmanager
def _progress() -> Iterator[PlanProgress]:
    """Show a bar on a terminal after a second."""
    if not has_cursor(sys.stderr):
        yield lambda what, share: None
        return
    form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    with tqdm(desc="plan", total=1.0, delay=BAR_DELAY_S, leave=False, bar_format=form) as bar:

        def tell(what: str, share: float) -> None:
            bar.set_description_str(what, refresh=False)
            bar.update(min(share, 1.0 - bar.n))

        yield tell
