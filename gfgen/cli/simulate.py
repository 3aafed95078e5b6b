"""`gfgen simulate`."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

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
    RankCounts,
    SimulatedMemory,
    choose_profile,
    default_ranks,
    describe,
)
from gfgen.cluster.simulated import MAX_NODES, simulate_nodes
from gfgen.errors import InputError, OutputError, RunError
from gfgen.policies.catalog import NamedPolicy, load_policy
from gfgen.runtime.control.decider import FALLBACK
from gfgen.runtime.core.admission import check_batch, families_of
from gfgen.runtime.core.observer import Observer
from gfgen.runtime.files import resume
from gfgen.runtime.files.journal import JOURNAL_NAME
from gfgen.runtime.files.lock import hold_folder
from gfgen.runtime.files.manifest import MANIFEST_NAME, SIMULATED, ManifestWriter, check_own, read_manifest
from gfgen.runtime.predict.cost import uncertain
from gfgen.runtime.predict.profile_file import Profile
from gfgen.runtime.report.trace import TraceWriter
from gfgen.runtime.simulate.comparison import numbers, table
from gfgen.runtime.simulate.simulation import Simulated
from gfgen.runtime.simulate.simulation import simulate as run_simulation
from gfgen.session.admission import admit_weightless, warn_of_passed_deadlines
from gfgen.system.wording import counted

TRACE_NAME = "trace.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Those of the command, in the order of its help."""

    jobs: JobOptions = group(JobOptions)
    policies: tuple[str, ...] = option(
        "NAME[,option=value...]; 'gfgen policies' lists them. Repeat to compare.",
        "--policy",
        type=A_POLICY,
        multiple=True,
        default=("auto",),
    )
    ranks: tuple[int, ...] | None = option(
        "Numbers of ranks: 4, 1,2,4 or 1..8. [4]", type=RankCounts(), metavar="N"
    )
    nodes: tuple[int, ...] | None = option(
        "Numbers of machines that each have this many ranks (docs/cluster.md). [one]",
        type=RankCounts("nodes", most=MAX_NODES),
        metavar="N",
    )
    profile_path: Path | None = profile_option()
    model: str = model_option()
    batch: int = batch_option()
    memory: str | None = simulated_memory_option()
    output: Path | None = option(
        "Folder for the simulated manifests and traces.",
        "-o",
        type=click.Path(file_okay=False, path_type=Path),
    )
    as_json: bool = flag("Print JSON instead of the table.", "--json")


@click.command()
@takes(given=Arguments)
def simulate(given: Arguments) -> int:
    """Run JOBS in virtual time, and show how each policy performs. Needs no weights and no GPU.

    The simulation uses the scheduler and the policies of a real run. Only task times are predicted.
    """
    configure_log("warning")
    nodes, output = given.nodes, given.output
    if nodes and (given.memory or output or given.batch > 1):
        name = "--memory" if given.memory else "--output" if output else "--batch"
        raise click.UsageError(f"{name} goes with one machine; leave out --nodes")
    named = [load_policy(text) for text in dict.fromkeys(given.policies)]
    source = given.jobs.source()
    admitted = admit_weightless(source, default_model=given.model, has_bar=has_cursor(sys.stderr))
    check_batch(given.batch, families_of(admitted))
    room = SimulatedMemory.of(admitted, given.memory, source=source.name)
    counts = given.ranks or default_ranks(given.profile_path, admitted)
    profile = choose_profile(given.profile_path, admitted, num_ranks=max(counts))
    now = time.time()  # the same for all policies, since deadlines may be times of day
    warn_of_passed_deadlines(admitted, now=now)
    asked = [
        _Asked(policy, num_ranks, num_nodes, policy.name + _place(num_ranks, counts, num_nodes, nodes))
        for policy, num_ranks, num_nodes in itertools.product(named, counts, nodes or (None,))
    ]
    folders = [_folder(output, each.name, is_only=len(asked) == 1) for each in asked]
    runs, failures = [], []
    with _held(output, folders):
        for each, folder in zip(asked, folders, strict=True):
            try:
                done = _simulate(room, each, profile, folder, started_at=now, batch=given.batch)
                runs.append((each.name, done))
            except OutputError:
                raise
            except RunError as error:
                failures.append(f"{each.name}: {error}")
    on = _machines(counts, nodes)
    _report(runs, profile, on, most=max(counts), room=room, as_json=given.as_json, failures=failures)
    for failure in failures:
        click.echo(f"gfgen: {failure}", err=True)
    if output is not None and runs and not given.as_json:
        click.echo(f"manifests and traces are in {output}/: 'gfgen plot {output}' draws them")
    return 1 if failures else 0


@dataclass(frozen=True, slots=True)
class _Asked:
    policy: NamedPolicy
    num_ranks: int
    num_nodes: int | None
    name: str


def _place(num_ranks: int, counts: Sequence[int], num_nodes: int | None, nodes: Sequence[int] | None) -> str:
    """What tells this run from others of its policy, such as ' on 4 x 8'."""
    if nodes and len(nodes) > 1:
        return f" on {num_nodes} x {num_ranks}"
    return f" on {num_ranks}" if len(counts) > 1 else ""


def _machines(counts: Sequence[int], nodes: Sequence[int] | None) -> str:
    """Such as '4 ranks', or '1 and 2 nodes with 8 ranks'."""
    ranks = counted(counts[0], "rank") if len(counts) == 1 else f"{_listed(counts)} ranks"
    if nodes is None:
        return ranks
    return f"{counted(nodes[0], 'node') if len(nodes) == 1 else f'{_listed(nodes)} nodes'} with {ranks}"


def _simulate(
    room: SimulatedMemory,
    asked: _Asked,
    profile: Profile,
    folder: Path | None,
    *,
    started_at: float,
    batch: int,
) -> Simulated:
    policy, num_ranks = asked.policy, asked.num_ranks
    if asked.num_nodes is not None:
        return simulate_nodes(
            room.jobs,
            policy=policy,
            num_nodes=asked.num_nodes,
            num_ranks=num_ranks,
            profile=profile,
            started_at=started_at,
        )
    with contextlib.ExitStack() as stack:
        writers = _observers(folder)
        observers = [stack.enter_context(contextlib.closing(each)) for each in writers]
        return run_simulation(
            room.jobs,
            policy=policy,
            num_ranks=num_ranks,
            profile=profile,
            started_at=started_at,
            batch=batch,
            observers=observers,
            residency=room.residency(num_ranks),
        )


@contextlib.contextmanager
def _held(output: Path | None, folders: Sequence[Path | None]) -> Iterator[None]:
    """Create and lock the output folders, and remove earlier simulations.

    Raises: LockedError while a run uses a folder; InputError for a folder of a real run.
    """
    with contextlib.ExitStack() as stack:
        held = [folder for folder in dict.fromkeys([output, *folders]) if folder is not None]
        for folder in held:
            _make(folder)
            stack.enter_context(hold_folder(folder))
            check_own(folder / MANIFEST_NAME)
            if _is_of_a_run(folder):
                raise InputError(f"--output {folder}: contains files of a run; name another folder")
        if output is not None:
            _clear(output, held)
        yield


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; choose another --output") from None


def _is_of_a_run(folder: Path) -> bool:
    """Whether a run wrote to the folder. A stopped simulation leaves an empty manifest, too."""
    if any((folder / name).exists() for name in (JOURNAL_NAME, resume.FOLDER)):
        return True
    return any(not entry.get(SIMULATED) for entry in read_manifest(folder / MANIFEST_NAME).values())


def _clear(output: Path, held: Collection[Path]) -> None:
    """Remove earlier simulations, which must not be compared with this one."""
    for manifest in (output / MANIFEST_NAME, *output.glob(f"*/{MANIFEST_NAME}")):
        folder = manifest.parent
        if not read_manifest(manifest) or (folder not in held and _is_of_a_run(folder)):
            continue
        with contextlib.nullcontext() if folder in held else hold_folder(folder):
            manifest.unlink()
            (folder / TRACE_NAME).unlink(missing_ok=True)
        if folder not in held:
            with contextlib.suppress(OSError):  # it contains other files
                folder.rmdir()


def _observers(folder: Path | None) -> Iterator[Observer]:
    if folder is None:
        return
    manifest = folder / MANIFEST_NAME
    manifest.unlink(missing_ok=True)
    yield ManifestWriter(manifest, is_simulated=True)
    yield TraceWriter(folder / TRACE_NAME, is_simulated=True)


def _folder(output: Path | None, name: str, *, is_only: bool) -> Path | None:
    """The folder of a run: a subfolder if there are several runs."""
    if output is None or is_only:
        return output
    return output / re.sub(r"[^\w.=]+", "-", name).strip("-.")


def _report(
    runs: Sequence[tuple[str, Simulated]],
    profile: Profile,
    on: str,
    *,
    most: int,
    room: SimulatedMemory,
    as_json: bool,
    failures: Sequence[str],
) -> None:
    turns = room.in_words(most)
    found = sorted({doubt for _, run in runs for doubt in run.doubts})
    doubts = uncertain(found, has_writes=profile.has_writes) if runs else None
    if as_json:
        said = {"memory": turns, "doubts": doubts, "failures": list(failures)}
        click.echo(json.dumps(_as_json(runs, profile) | said, indent=1))
        return
    click.echo(f"{counted(len(room.jobs), 'job')} on {on}, simulated with {describe(profile)}\n")
    if runs:
        click.echo("\n".join(table([(name, run.summary) for name, run in runs])) + "\n")
    for name, run in runs:
        if run.summary.policy_fault is not None:
            click.echo(f"{name} failed too often ({run.summary.policy_fault}): {FALLBACK} took over\n")
    if turns:
        click.echo(turns)
    if doubts:
        click.echo(f"Uncertain: {doubts}")


def _as_json(runs: Sequence[tuple[str, Simulated]], profile: Profile) -> dict[str, Any]:
    about = {"device": profile.device, "date": profile.date, "source": profile.source}
    return {
        "profile": about,
        "runs": [
            {
                "policy": run.policy,
                "num_ranks": run.num_ranks,
                "fault": run.summary.policy_fault,
                "name": name,
                **numbers(run.summary),
            }
            for name, run in runs
        ],
    }


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:-1])) + f" and {counts[-1]}"
