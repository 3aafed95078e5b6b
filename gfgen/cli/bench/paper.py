"""`gfgen bench paper`: the evaluation of GF-DiT on this machine, or simulated."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import click

from gfgen import log
from gfgen.bench import paper as figures_of_paper
from gfgen.bench.paper.cells import Cell, CellStore, Place, Results, found_of, simulated
from gfgen.bench.paper.figures import FIGURES, Grid, auto_by_point, fidelity, grid_cells
from gfgen.bench.paper.page import Section, write_page
from gfgen.bench.policy_comparison import PolicyRun, attempt
from gfgen.bench.stock import is_stock
from gfgen.bench.workloads import admitted, calibration_jobs, load_compared, models_of, weightless_model
from gfgen.cli import options as opt
from gfgen.cli.bench.runs import WARM_UP_STEPS, run_outside, started_workers
from gfgen.cli.shown.prediction import choose_profile
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.fields import MAX_STEPS
from gfgen.runtime.core.devices import find_gpus
from gfgen.runtime.predict.profile_file import Profile, load_profile
from gfgen.runtime.predict.profile_store import SHIPPED
from gfgen.session.ranks import Ranks
from gfgen.system.linefile import write_whole
from gfgen.system.wording import counted

MODELS, REAL_MODELS = ("wan2.2-ti2v-5b", "qwen-image"), ("tiny-wan",)
GRID = "grid"
STORED = Path(figures_of_paper.__file__).parent / "grid.json"
DEADLINES = "Deadlines are multiples of the time that a job takes alone on N ranks."
deadlines_option = partial(opt.option, DEADLINES, type=opt.RANKS, default=1, metavar="N")
MOST_LOST = 0.02
"""Attainment that `auto` may lose at a point before --check fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    names: tuple[str, ...] = opt.option(
        "Figure or table to make. Repeatable. The grid is always simulated, with five seeds of 80 jobs. "
        "[all but the grid]",
        "--figure",
        multiple=True,
        type=click.Choice([*FIGURES, "all"]),
    )
    is_simulated: bool = opt.flag("Simulate with a profile. This is the default without GPUs.", "--simulate")
    is_checked: bool = opt.flag(
        "Simulate the grid and fail if `auto` loses 2 points anywhere against the stored table.", "--check"
    )
    models: tuple[str, ...] = opt.option(
        "Model whose job classes are used, or several joined by '+', whose jobs are mixed. Repeatable. "
        f"[{', '.join(MODELS)}; on CPU ranks {REAL_MODELS[0]}]",
        "--model",
        multiple=True,
    )
    seeds: int = opt.option("Number of seeds.", type=click.IntRange(1, 100), default=3)
    num_jobs: int = opt.option(
        "Number of jobs of a workload.", "--jobs", type=click.IntRange(1, 100_000), default=120
    )
    minutes: float | None = opt.option("No job arrives later than this.", type=opt.FiniteRange(0.01))
    steps: int | None = opt.option(
        "Steps of each job; time-outs shrink with them. [25; tiny models: 6]",
        type=click.IntRange(1, MAX_STEPS),
    )
    load: float = opt.option("Load of figures 6, 7 and 11.", type=opt.FiniteRange(0.01, 100), default=0.9)
    deadlines_from: int = deadlines_option()
    further: tuple[str, ...] = opt.option(
        "Policy beside the paper's, as of bench compare. Repeatable.",
        "--policy",
        multiple=True,
        type=opt.A_POLICY,
    )
    profile_path: Path | None = opt.profile_option()
    output: Path = opt.option(
        "Folder for the page and its cells. Cells that are there are not run again.",
        "-o",
        type=opt.NamedPath(file_okay=False),
        default=Path("outputs/paper"),
    )
    ranks: opt.RankOptions = opt.group(
        opt.RankOptions,
        without=("memory", "offload", "trust_remote_code", "compile", "precision", "attention"),
        ranks=opt.option("Number of ranks. [2 on a CPU; all GPUs; simulated: 4]", type=opt.RANKS),
    )


@click.command()
@opt.takes(given=Arguments)
def paper(given: Arguments) -> int:
    """Make the figures of the GF-DiT paper (arXiv 2606.13501) as Markdown, JSON, PNG and one HTML page.

    Each policy on each workload is a cell, kept as a file by the card on which it ran. A run that stops goes
    on where it was, and cells can be carried to other machines with that card.
    """
    log.configure(level="warning")
    if given.is_checked:
        return _check(given)
    is_real = not given.is_simulated and (given.ranks.device == "cpu" or bool(find_gpus()))
    ranks = given.ranks.found(cpu_ranks=2) if is_real else None
    models = given.models or (MODELS if ranks is None or ranks.are_on_gpus else REAL_MODELS)
    for text in given.further:
        load_compared(text)
    profile = _profile(given, models, ranks)
    num_ranks = ranks.num_ranks if ranks else given.ranks.ranks or 4
    kept = ("seeds", "num_jobs", "minutes", "steps", "load", "deadlines_from", "further")
    grid = Grid(models, num_ranks, profile, **{name: getattr(given, name) for name in kept})
    chosen = {*FIGURES} - {GRID} if not {*given.names} - {"all"} else {*given.names}
    cells = {name: figure.cells(grid) for name, figure in FIGURES.items() if name in chosen}
    stores = {
        is_sim: CellStore(given.output, Place(profile.device, num_ranks, profile.hash, is_sim))
        for is_sim in (True, False)
    }
    stop: InterruptedRunError | None = None
    try:
        for is_sim, store in stores.items():
            wanted = [cell for name in cells if is_sim in _kinds(name, is_real) for cell in cells[name]]
            _make(wanted, store, profile, given, ranks)
    except InterruptedRunError as error:
        stop = error
    sections = [each for name in cells for each in _sections(name, cells[name], grid, stores, given, is_real)]
    written = write_page(
        given.output, f"The evaluation of GF-DiT, {stores[not is_real].place.words}", sections
    )
    click.echo(f"{', '.join(written)} are in {given.output}/")
    if stop is not None:
        raise stop
    return 0


def _kinds(name: str, is_real: bool) -> tuple[bool, ...]:
    """Whether the figure is simulated, run, or both; without ranks its kept runs are shown."""
    match name:
        case "grid":
            return (True,)
        case "8":
            return (False,)
        case "11":
            return (True, False)
        case _:
            return (False,) if is_real else (True, False)


def _profile(given: Arguments, models: Sequence[str], ranks: Ranks | None) -> Profile:
    """From which arrivals and deadlines follow."""
    kept = sorted(given.output.glob("profile-*.json"))
    if given.profile_path is not None:
        return load_profile(given.profile_path)
    if ranks is None:
        return load_profile(SHIPPED / "h200.json")
    if len(kept) == 1:  # of the cells that are there
        return load_profile(kept[0])
    names = [name for model in models for name in models_of(model)]
    jobs = [job for name in names for job in admitted(calibration_jobs(name), weightless_model(name))]
    found = choose_profile(None, jobs, num_ranks=ranks.num_ranks)
    write_whole(given.output / f"profile-{found.hash[:8]}.json", found.as_json())
    return found


def _make(
    cells: Sequence[Cell], store: CellStore, profile: Profile, given: Arguments, ranks: Ranks | None
) -> None:
    """Run the cells that are not kept, if this machine can; each is kept when it ends."""
    known, place = store.read(cells), store.place
    todo = [cell for cell in dict.fromkeys(cells) if cell not in known]
    if not todo or (ranks is None and not place.is_simulated):
        return
    if place.is_simulated or ranks is None:
        runs = simulated(todo, profile, num_ranks=place.num_ranks)
    else:
        todo.sort(key=lambda cell: (cell.model, is_stock(cell.policy), cell.seed, cell.workload))
        runs = _on_workers(todo, profile, given.output, ranks)
    num_done = 0
    try:
        with (
            closing(runs),
            click.progressbar(length=len(todo), label=place.words, file=sys.stderr) as bar,
        ):
            for cell, run in runs:
                store.keep(cell, run)
                num_done += 1
                bar.update(1)
    except (KeyboardInterrupt, InterruptedRunError) as stop:
        number = stop.signal_number if isinstance(stop, InterruptedRunError) else signal.SIGINT
        raise InterruptedRunError(
            f"stopped; {num_done} of {counted(len(todo), 'cell')} kept: run the same command again to go on",
            signal_number=number,
        ) from None


def _on_workers(
    cells: Sequence[Cell], profile: Profile, output: Path, ranks: Ranks
) -> Generator[tuple[Cell, PolicyRun], None, None]:
    """Run the cells of each model on one pool of workers, after a short job of each kind; then diffusers."""
    output.mkdir(parents=True, exist_ok=True)
    for model, of_model in groupby(cells, key=lambda cell: cell.model):
        jobs = {cell: cell.jobs(profile, num_ranks=ranks.num_ranks) for cell in of_model}
        own = [cell for cell in jobs if not is_stock(cell.policy)]
        if own:
            with started_workers(model, ranks, output, profile, steps=own[0].steps) as workers:
                workers.warm_up([spec for cell in own for spec in jobs[cell]], steps=WARM_UP_STEPS)
                for cell in own:
                    yield cell, attempt(cell.policy, partial(workers.run, cell.policy, jobs[cell]))
        for cell in (cell for cell in jobs if is_stock(cell.policy)):
            yield cell, run_outside(cell.policy, jobs[cell], model, ranks, output)


def _sections(
    name: str,
    cells: Sequence[Cell],
    grid: Grid,
    stores: Mapping[bool, CellStore],
    given: Arguments,
    is_real: bool,
) -> Iterator[Section]:
    """One for the simulated cells and one for those that ran; figure 11 has both in one."""
    figure, kinds = FIGURES[name], _kinds(name, is_real)
    found = {is_sim: stores[is_sim].read(cells) for is_sim in kinds}
    kept, text = given.output / f"{name}.txt", None
    if figure.elsewhere is not None:
        text = kept.read_text() if kept.exists() else f"Not run here: `{figure.elsewhere} > {kept}`."
    for is_sim in kinds:
        known = found[is_sim]
        if name == "11":
            tables = tuple(fidelity(grid, *map(Results, found.values())))
        else:
            tables = tuple(figure.tables(grid, Results(known)))
        commits = sorted({each.commit[:8] for each in known.values() if each.commit})
        errors = {each.error: cell.policy for cell, each in known.items() if each.error}
        where = stores[is_sim].place.words
        words = [where if known or not cells else f"not {where}"]
        words += [f"commit {', '.join(commits)}"] if commits else []
        words += [f"{policy}: {error}" for error, policy in errors.items()]
        if is_sim is kinds[0]:
            yield Section(name, figure, "; ".join(words) + ".", tables, text)
        elif known and name != "11":
            yield Section(f"{name}-run", figure, "; ".join(words) + ".", tables)


def _check(given: Arguments) -> int:
    if name := opt.given_in(
        given, "names", "models", "seeds", "num_jobs", "minutes", "steps", "load", "deadlines_from", "further"
    ):
        raise InputError(f"{name}: --check simulates the stored grid as it is; leave it out")
    profile = load_profile(given.profile_path or SHIPPED / "h200.json")
    grid = Grid(MODELS, 4, profile)
    cells = [cell for cell in grid_cells(grid) if cell.policy == "auto"]
    with closing(simulated(cells, profile, num_ranks=4)) as runs:
        found = auto_by_point(Results({cell: found_of(cell, run) for cell, run in runs}))
    try:
        stored = json.loads(STORED.read_text())
        if stored.keys() != found.keys():
            raise ValueError("its points are not those of the grid")
    except (OSError, ValueError) as error:
        raise InputError(f"{STORED}: cannot be compared with ({error})") from None
    lost = [
        f"{point}: {was:.1%} -> {now:.1%} {kind}"
        for point, before in stored.items()
        for was, now, kind in zip(
            before, found[point], ("for the client", "by the bare deadline"), strict=True
        )
        if now < was - MOST_LOST
    ]
    click.echo("\n".join([*lost, f"{counted(len(lost), 'value')} of {2 * len(stored)} lost over 2 points"]))
    return 1 if lost else 0
