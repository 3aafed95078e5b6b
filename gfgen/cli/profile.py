"""`gfgen profile`: measure how long tasks take on this machine."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from gfgen.bench import profiling
from gfgen.bench.profiling import Measurement, Samples
from gfgen.bench.workloads import MIXES, calibration_jobs
from gfgen.cli import options as opt
from gfgen.cli.shown.prediction import known_here
from gfgen.errors import InputError, InterruptedRunError
from gfgen.job.reader import JobSource
from gfgen.job.spec import JobSpec
from gfgen.models.families.registry import DEFAULT_MODEL, PACKAGED, TINY_NAMES
from gfgen.runtime.core.admission import AdmittedJob
from gfgen.runtime.core.devices import DEFAULT_CPU_RANKS
from gfgen.runtime.predict.cost import CostModel
from gfgen.runtime.predict.profile_file import ProfileRow
from gfgen.runtime.predict.profile_store import check_replaceable, default_path, save_profile
from gfgen.runtime.processes.starting import warm_up
from gfgen.session.admission import jobs_to_run, judge
from gfgen.session.ranks import Ranks, admitted_on, ready_pool
from gfgen.session.warming import warm_ups
from gfgen.system.linefile import write_whole
from gfgen.system.machine import versions
from gfgen.system.signals import SignalPipe
from gfgen.system.wording import counted, in_words

logger = logging.getLogger(__name__)

_MEASURED_MODELS = {False: (DEFAULT_MODEL,), True: ("wan2.2-ti2v-5b", "qwen-image")}
"""Unless others are named, by whether ranks are on GPUs."""
SMALL_SIZES = {"video": ("128x128x1", "128x128x17", "128x128x33"), "image": ("128x128", "256x256", "384x384")}
SIZES = {
    "video": ("832x480x49", "832x480x81", "1280x704x81", "1280x704x121"),
    "image": ("512x512", "1024x1024", "1536x1536"),
}
"""Of all other models. Shapes between these are interpolated."""
BUDGET_S = 90.0
"""For the built-in model without JOBS; the first round may take longer."""
_LOADING_S = 15.0
"""To start workers with small models on two cores; large models take longer."""


@click.command()
@click.argument("jobs", metavar="[JOBS]", required=False, type=opt.Named())
@click.option(
    "--model",
    "models",
    type=opt.A_MODEL,
    multiple=True,
    help="Model for jobs without one. Without JOBS: model to measure; repeatable. "
    f"[{DEFAULT_MODEL}; on GPUs {', '.join(_MEASURED_MODELS[True])}]",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    metavar="WxH[xF]",
    help="Without JOBS: size to measure; repeatable. [three or four sizes]",
)
@click.option(
    "--output",
    "-o",
    type=opt.NamedPath(dir_okay=False),
    help="File for the profile. [where 'gfgen run' finds it]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be measured and how long it takes.")
@opt.takes(
    ranks=opt.group(
        opt.RankOptions,
        without=("ranks_per_gpu", "memory", "offload", "trust_remote_code", "compile"),
        ranks=opt.option(
            f"Measure on 1 up to this many ranks. [{DEFAULT_CPU_RANKS} on a CPU; all GPUs]", type=opt.RANKS
        ),
    )
)
def profile(
    *,
    jobs: str | None,
    models: tuple[str, ...],
    sizes: tuple[str, ...],
    ranks: opt.RankOptions,
    output: Path | None,
    dry_run: bool,
) -> None:
    """Measure how long each task takes on this machine. Runs, plans and simulations predict from it.

    Measures each stage of the models and shapes of JOBS, on every number of ranks (GPUs: 1, 2, 4, 8).
    Run nothing else in the meantime. If you stop it, the same command continues where it stopped.
    """
    opt.configure_log("info")
    if jobs is not None and (len(models) > 1 or sizes):
        raise click.UsageError("give either JOBS, with at most one --model, or --model and --size")
    if output is not None:
        check_replaceable(output)
    options = ranks.found()
    if jobs is not None:
        admission = options.admission(models[0] if models else DEFAULT_MODEL)
        found = judge(JobSource(files=(jobs,)), admission)
        checkpoints = {job.checkpoint for job in found.jobs}
        admission.memory.check_together(checkpoints)
        admitted, _ = jobs_to_run(found)
        on_host = admission.memory.copies_on_host(checkpoints)
    else:
        admitted = _default_jobs(models or _MEASURED_MODELS[options.are_on_gpus], sizes, options)
        on_host = ()
    path = output or default_path(options.profiled_as)
    most = _widest(options)
    costs = CostModel(known_here(admitted, options))
    plan = profiling.plan_measurements(admitted, num_ranks=most, are_on_gpus=options.are_on_gpus)
    if jobs is None and not options.are_on_gpus and all(job.spec.model in PACKAGED for job in admitted):
        num_ranks = options.num_ranks
        plan = profiling.within(
            plan, lambda entry: profiling.predicted_s(entry, costs, num_ranks=num_ranks), budget_s=BUDGET_S
        )
    unfinished = _Unfinished(path, plan, options)
    todo = [measurement for measurement in plan if measurement.key not in unfinished.measured]
    _announce(plan, todo, costs, options)
    if dry_run:
        return
    unfinished.save()  # before anything is measured
    _measure(todo, unfinished, costs, options, on_host)
    words = [*_given(jobs, models, sizes), "--ranks", str(options.num_ranks), *options.words]
    made = profiling.assemble(
        unfinished.measured,
        plan,
        device=options.profiled_as,
        source=" ".join(["gfgen", "profile", *words]),
        num_ranks=most,
        versions=versions(),
    )
    save_profile(made, path)
    unfinished.remove()
    for line in _table(made.rows):
        click.echo(line)
    click.echo(f"wrote {counted(len(made.rows), 'row')} to {path}")


def _widest(options: Ranks) -> int:
    return max(map(len, options.devices.islands))


def _default_jobs(models: Sequence[str], sizes: Sequence[str], options: Ranks) -> Sequence[AdmittedJob]:
    specs: list[JobSpec] = []
    for model in models:
        if options.are_on_gpus and model in MIXES and not sizes:
            specs += [replace(spec, id=f"{model}-{spec.tag}") for spec in calibration_jobs(model)]
            continue
        guidance = MIXES[model].guidance if options.are_on_gpus and model in MIXES else {}
        kind = options.admission(model).models.find(model).geometry.kind
        usual = (SMALL_SIZES if model in (*PACKAGED, *TINY_NAMES) else SIZES)[kind]
        for size in sizes or usual:
            own: dict[str, Any] = {
                "id": f"{model}-{size}",
                "model": model,
                "seed": 0,
                **_size(size),
                **guidance,
            }
            specs.append(JobSpec(prompt="a red fox trots through fresh snow at dawn", **own))
    return admitted_on(options, specs, default_model=models[0], source="--model and --size")


def _size(text: str) -> dict[str, int]:
    parts = text.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"--size {text}: give a size such as 832x480, or 832x480x81 with frames")
    return dict(zip(("width", "height", "frames"), map(int, parts), strict=False))


def _given(jobs: str | None, models: Sequence[str], sizes: Sequence[str]) -> Iterator[str]:
    if jobs is not None:
        yield Path(jobs).name
    for name, values in (("--model", models), ("--size", sizes)):
        for value in values:
            yield from (name, Path(value).name)


def _announce(
    plan: Sequence[Measurement], todo: Sequence[Measurement], costs: CostModel, options: Ranks
) -> None:
    shapes = list(dict.fromkeys(f"{entry.model} {entry.job.shape}" for entry in plan))
    click.echo(f"shapes: {', '.join(shapes)}")
    seconds = _predicted_s(todo, costs, options)
    done = len(plan) - len(todo)
    kept = f", {done} of them already done" if done else ""
    guessed = " (a guess, which improves after the first measurement)" if costs.doubts else ""
    widest, kind = _widest(options), "GPU" if options.are_on_gpus else "rank"
    where = counted(widest, kind) if widest == 1 else f"1 to {counted(widest, kind)}"
    click.echo(
        f"{counted(len(plan), 'measurement')} on {where}{kept}: about {in_words(seconds)}{guessed}, and "
        f"{in_words(_LOADING_S)} or more to load the models"
    )


def _predicted_s(todo: Sequence[Measurement], costs: CostModel, options: Ranks) -> float:
    num_ranks = options.num_ranks
    return math.fsum(profiling.predicted_s(entry, costs, num_ranks=num_ranks) for entry in todo)


def _measure(
    todo: Sequence[Measurement],
    unfinished: _Unfinished,
    costs: CostModel,
    options: Ranks,
    on_host: Collection[Path],
) -> None:
    if not todo:
        return
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(contextlib.closing(SignalPipe()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gfgen-profile-")))
        checkpoints, memory = {entry.job.checkpoint for entry in todo}, options.memory
        memory.fit([entry.job for entry in todo])
        held: dict[str, Any] = {"placements": memory.streaming(checkpoints), "patch_copies_on_host": on_host}
        pool = stack.enter_context(ready_pool(checkpoints, options, signals, are_all_needed=True, **held))
        if options.has_graphs and options.are_on_gpus:
            sizes = [size for size in (1, 2, 4, 8) if size <= _widest(options)]
            for item, answer in warm_up(pool, warm_ups(profiling.jobs_like(todo), sizes), signals):
                if answer.reason is not None:
                    logger.warning("warming up %s: %s", item.checkpoint, answer.reason)
        for number, entry in enumerate(todo):
            left_s = _predicted_s(todo[number:], costs, options)
            logger.info("%d of %d: %s, %s left", number + 1, len(todo), entry.key, in_words(left_s))
            try:
                samples = profiling.measure(entry, pool, folder=folder, signals=signals)
            except InterruptedRunError as error:
                raise InterruptedRunError(
                    f"stopped; {number} of {len(todo)} are measured: run the same command again to go on",
                    signal_number=error.signal_number,
                ) from None
            unfinished.add(entry, samples)
            profiling.learn(entry, samples, costs)


class _Unfinished:
    """What a profile that was stopped has measured: the same command goes on from there."""

    def __init__(self, path: Path, plan: Sequence[Measurement], options: Ranks) -> None:
        self._path = path.with_name(f".{path.name}.unfinished")
        self._stamp = [options.profiled_as, dict(versions()), options.num_ranks, *options.words]
        self.measured: dict[str, Samples] = {}
        keys = {entry.key for entry in plan}
        faults = OSError, ValueError, KeyError, TypeError
        with contextlib.suppress(*faults):  # none, or that of another version
            found = json.loads(self._path.read_text())
            samples = found["samples"].items() if found["stamp"] == self._stamp else ()
            self.measured = {key: Samples(**each) for key, each in samples if key in keys}

    def save(self) -> None:
        """Raises: InputError where the file cannot be written."""
        samples = {key: asdict(each) for key, each in self.measured.items()}
        try:
            write_whole(self._path, json.dumps({"stamp": self._stamp, "samples": samples}))
        except OSError as error:
            folder = self._path.parent
            raise InputError(f"--output {folder}: cannot be made or written ({error.strerror})") from None

    def add(self, entry: Measurement, samples: Samples) -> None:
        self.measured[entry.key] = samples
        self.save()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _table(rows: Sequence[ProfileRow]) -> Iterator[str]:
    yield f"{'model and shape':<34}{'stage':<9}{'degrees':<9}{'alone':>9}{'spread':>9}{'loaded':>9}  samples"
    for row in rows:
        loaded = "" if row.loaded_s is None else in_words(row.loaded_s)
        yield (
            f"{row.model + ' ' + row.shape:<34}{row.stage!s:<9}{'x'.join(map(str, row.degrees)):<9}"
            f"{in_words(row.seconds):>9}{in_words(row.spread_s):>9}{loaded:>9}  {row.num_samples}"
        )
