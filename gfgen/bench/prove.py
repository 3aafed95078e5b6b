"""Whether gfgen makes the pictures of diffusers' own pipelines on this machine, and how fast.

A stock pipeline makes a job of each model in a process of its own, then ranks of gfgen do, at each degree. A
second run is timed, with another number in its prompt, because ranks keep embeddings.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from gfgen.bench.scripted import MeasuredRun, spans_of
from gfgen.bench.stock import make_alone
from gfgen.bench.stock_worker import StockRanks
from gfgen.errors import GfgenError, InterruptedRunError, JobFileError, WorkerError
from gfgen.graph import Stage
from gfgen.job.spec import JobSpec
from gfgen.models.families.precision import Precision
from gfgen.models.families.registry import check_here
from gfgen.models.geometry.pipeline import PipelineGeometry
from gfgen.models.stepping.small_job import pictures, resolved
from gfgen.policies.catalog import load_policy
from gfgen.runtime.core.admission import AdmittedJob, ResolvedModel, admit
from gfgen.session.ranks import Ranks
from gfgen.session.session import Session, SessionOptions
from gfgen.system.machine import commit, versions
from gfgen.system.wording import size_in_words, table_head, table_row

logger = logging.getLogger(__name__)

STEPS, SEED, PROMPT = 4, 7, "a red fox and {} birds in fresh snow"
MOVED = (None, "model", "sequential")
"""What diffusers moves to a GPU at its turn; the next one where memory is short."""
COLUMNS = "model | size | made by | ranks | picture | step, s | job, s | step, x | job, x"
NOTE = f"""
{STEPS} steps, seed {SEED}. On one rank, without "fused", "compiled" and "fp8", gfgen promises the bytes of
diffusers. Times are of a second run: the median of steps after the first, and a job from prompt to pixels in
main memory. x: how many times as fast as diffusers. "compiled" uses torch.compile, "fused" gfgen's kernels.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """How a model's job was made, or why it was not."""

    model: str
    job: str = ""
    made_by: str = ""
    picture: str = ""
    num_ranks: int = 1
    step_s: float | None = None
    job_s: float | None = None

    @property
    def breaks_promise(self) -> bool:
        is_promised = self.num_ranks == 1 and self.made_by in ("gfgen, bf16", "gfgen, fp32")
        return is_promised and self.picture.startswith("differs")


def proof(names: Sequence[str], ranks: Ranks, *, minutes: float) -> Iterator[Row]:
    """The rows of these models. After the time, or Ctrl-C, they say what was not tried.

    Raises: InterruptedRunError at the end, after Ctrl-C.
    """
    until_s, is_over = time.monotonic() + 60 * minutes, False
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a script it is ignored
    alarm = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGINT))
    alarm.daemon = True
    alarm.start()
    for idx, name in enumerate(names):
        share_s = (until_s - time.monotonic()) / (len(names) - idx)
        try:
            if is_over:
                raise WorkerError("not tried")
            with pictures() as given, tempfile.TemporaryDirectory(prefix="gfgen-prove-") as folder:
                yield from _rows(name, ranks, given, Path(folder), timeout_s=share_s / 3)
        except (KeyboardInterrupt, InterruptedRunError):
            is_over = True
            yield Row(name, picture="stopped here; the rest was not tried")
        except GfgenError as error:
            yield Row(name, picture=str(error))
    alarm.cancel()
    if is_over and time.monotonic() < until_s:
        raise InterruptedRunError("stopped; the table has what was tried", signal_number=signal.SIGINT)


def _rows(name: str, ranks: Ranks, given: Path, folder: Path, *, timeout_s: float) -> Iterator[Row]:
    if not ranks.has_random_weights:
        check_here(name)
    model, usual = ranks.admission(name).models.find(name), "bf16" if ranks.are_on_gpus else "fp32"
    is_general, specs = isinstance(model.geometry, PipelineGeometry), _jobs(model, given, timeout_s)
    frames = f"x{specs[0].frames}" if (specs[0].frames or 1) > 1 else ""
    row, own = Row(name, f"{specs[0].size_text}{frames}"), replace(ranks, compile="off")
    yield _stock_row(model, specs[:2], ranks, row, folder / "diffusers")
    kinds = {usual if is_general or not ranks.are_on_gpus else f"{usual}, fused": own}
    if is_general and ranks.are_on_gpus:
        kinds[f"{usual}, compiled"] = replace(ranks, compile="on")
    kinds["fp8, fused"] = replace(own, precision=Precision(("fp8",)))
    for kind, each in kinds.items():
        yield from _own_rows(each, specs, replace(row, made_by=f"gfgen, {kind}"), folder)


def _jobs(model: ResolvedModel, given: Path, timeout_s: float) -> list[JobSpec]:
    """Short jobs of the model's own size, guided if the call takes a negative prompt."""
    taken = getattr(getattr(model.geometry, "signature", None), "arguments", ("negative_prompt",))
    negative = "blurry" if "negative_prompt" in taken else None
    spec = JobSpec(id="", prompt=PROMPT, negative_prompt=negative, steps=STEPS, seed=SEED, format="png")
    spec = resolved(model.geometry, replace(spec, model=model.name, timeout_s=timeout_s), given)
    return [replace(spec, id=f"{number}", prompt=PROMPT.format(number)) for number in range(1, 6)]


def _stock_row(model: ResolvedModel, specs: Sequence[JobSpec], ranks: Ranks, row: Row, folder: Path) -> Row:
    jobs, _ = admit(specs, default_model=model.name, find_model=lambda _: model)
    stock = StockRanks(model.checkpoint, 1, ranks.devices.kind, has_random_weights=ranks.has_random_weights)
    for moved in MOVED if ranks.are_on_gpus else MOVED[:1]:
        row = replace(row, made_by=f"diffusers, {moved} offload" if moved else "diffusers", picture="")
        logger.info("%s: %s", row.model, row.made_by)
        try:
            *_, last = make_alone(jobs, replace(stock, moved=moved), folder)
            row = replace(row, picture=last.error or "", step_s=last.timings["step_s"], job_s=last.busy_s)
        except WorkerError as error:
            row = replace(row, picture=str(error))
        if "out of memory" not in row.picture:
            break
    return row if not row.picture else replace(row, step_s=None, job_s=None)


def _own_rows(ranks: Ranks, specs: Sequence[JobSpec], row: Row, folder: Path) -> Iterator[Row]:
    logger.info("%s: %s", row.model, row.made_by)
    options = SessionOptions(
        output_dir=folder / "own", ranks=ranks, policy=load_policy("auto"), model=row.model
    )
    try:
        capability = min((gpu.capability for gpu in ranks.devices.gpus), default=None)
        ranks.precision.checked(capability=capability, device=ranks.device_name)
        with Session(options) as session:
            jobs, problems = session.admission(specs)
            if problems:
                raise JobFileError(row.model, tuple(problems))
            session.load(jobs[:1], are_all_needed=True)
            most = min(max(map(len, ranks.devices.islands)), jobs[0].limits.step_degree)
            degrees = sorted({min(degree, most) for degree in (1, 2, 4, most)})
            for row, timed in zip([replace(row, num_ranks=each) for each in degrees], jobs[1:], strict=False):
                yield _own_row(session, jobs[0], timed, row, folder)
    except InterruptedRunError:
        raise
    except GfgenError as error:
        yield replace(row, picture=str(error))


def _own_row(session: Session, job: AdmittedJob, timed: AdmittedJob, row: Row, folder: Path) -> Row:
    policy = load_policy(f"legacy,degree={row.num_ranks}")
    with tempfile.TemporaryDirectory(dir=folder) as made:
        options = replace(session.options, output_dir=Path(made), policy=policy)
        for each in (job, timed):
            record = MeasuredRun()
            session.run([each], options=options, observers=[record])
            if (number := session.signal_number) is not None:
                raise InterruptedRunError("stopped", signal_number=number)
            if record.errors:
                return replace(row, picture=record.errors[0])
        picture = compared(Path(made), folder / "diffusers", job.info.file)
    spans, (outcome,) = spans_of(record), record.outcomes
    steps = [number for number in sorted(spans) if record.dispatches[number].task.stage is Stage.DENOISE]
    ends_s = [max(span.end_s for span in spans[number].values()) for number in steps]
    step_s = statistics.median(after - before for before, after in pairwise(ends_s))
    job_s = outcome.ended_s - (outcome.started_s or 0.0) - record.written[timed.job_id]
    return replace(row, picture=picture, step_s=step_s, job_s=job_s)


def compared(ours: Path, theirs: Path, file: str) -> str:
    """How the pictures of this name, or of numbers after it, differ from those in another folder."""
    import numpy as np
    from PIL import Image

    pattern = file.replace("{frame}", "").replace(".png", "*.png")
    paths = [sorted(folder.glob(pattern)) for folder in (ours, theirs)]
    if not paths[1]:
        return "made; there is none of diffusers"
    one, other = (np.stack([np.asarray(Image.open(path)) for path in each]) for each in paths)
    if one.shape != other.shape:
        return f"differs: {one.shape} is not {other.shape}"
    far = np.abs(one.astype(np.int16) - other)
    if not far.any():
        return "the same bytes"
    noise = statistics.fmean(float(np.square(each, dtype=np.float64).mean()) for each in far)
    psnr_db = 10 * math.log10(255**2 / noise)
    return f"differs: {far.max()} of 255 at most, {far.mean():.2g} on average; {psnr_db:.1f} dB"


def table(rows: Sequence[Row], ranks: Ranks) -> str:
    """Markdown, to send to others."""
    size = f" of {size_in_words(ranks.devices.memory_bytes)}" if ranks.devices.memory_bytes else ""
    weights = ", random weights" if ranks.has_random_weights else ""
    found = ", ".join(f"{name} {number}" for name, number in versions().items())
    head = f"{ranks.description}{size}{weights}; {found}, commit {commit()[:12]}; {time.strftime('%Y-%m-%d')}"
    stock = {row.model: row for row in rows if row.made_by.startswith("diffusers")}
    lines = [head, "", table_head(COLUMNS)]
    for row in rows:
        own, base = ((each.step_s, each.job_s) for each in (row, stock.get(row.model, row)))
        words = (row.model, row.job, row.made_by, str(row.num_ranks), row.picture)
        cells = [" ".join(word.replace("|", "/").split()) for word in words]
        cells += ["" if a is None else f"{a:.3f}" for a in own]
        cells += [f"{b / a:.2f}" if a and b else "" for a, b in zip(own, base, strict=True)]
        lines.append(table_row(*cells))
    return "\n".join([*lines, NOTE])
