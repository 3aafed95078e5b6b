"""A transformer's forward, ours and diffusers' own, on 1, 2 and 4 GPUs in one run.

This process touches no GPU; the ranks do (benchmarks/measure_forward.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import measure_forward
from benchmarks.measure_forward import ForwardKind, ForwardShape
from benchmarks.measured import head, is_wanted, row
from gfgen.bench.gfc import check_num_gpus
from gfgen.cli.options import FiniteRange
from gfgen.errors import InputError
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout
from gfgen.runtime.ipc.settings import GPU_PLAN, HOST_PLAN
from gfgen.system.wording import counted

logger = logging.getLogger(__name__)

WAN, QWEN = "wan2.2-ti2v-5b", "qwen-image"
SHAPES = (
    ForwardShape(WAN, 832, 480, 49),
    ForwardShape(WAN, 832, 480, 81),
    ForwardShape(WAN, 1280, 704, 81),
    ForwardShape(WAN, 1280, 704, 121),
    ForwardShape(WAN, 1280, 704, 81, has_image=True),
    ForwardShape(QWEN, 512, 512, 1),
    ForwardShape(QWEN, 1024, 1024, 1),
    ForwardShape(QWEN, 1536, 1536, 1),
)
DEGREES = (1, 2, 4)
THEIRS = {
    "diffusers": ForwardKind(is_ours=False),
    "diffusers-compiled": ForwardKind(is_ours=False, is_compiled=True),
}
UNEVEN = {
    "diffusers-uneven": ForwardKind(is_ours=False, takes_anything=True),
    "diffusers-uneven-compiled": ForwardKind(is_ours=False, is_compiled=True, takes_anything=True),
}
"""Context parallelism only, for shapes whose tokens do not divide by the ranks: it refuses them otherwise."""
OURS = {
    "ours": ForwardKind(is_ours=True),
    "ours-graph": ForwardKind(is_ours=True, in_graph=True),
}
FP8 = {
    "ours-fp8": ForwardKind(is_ours=True, in_graph=True, precision="fp8"),
    "ours-fp8-attention": ForwardKind(is_ours=True, in_graph=True, precision="fp8 and attention"),
}
"""Not exact, so these do not count as the best of ours."""
HOST = {f"host-{way}": OURS["ours-graph"] for way in ("torus", "ring", "ulysses")}
"""Over main memory, as between GPUs that do not reach each other's; nor do these."""
BOTH = {
    "both-in-turn": ForwardKind(is_ours=True, in_graph=True, branches="in turn"),
    "both-in-batch": ForwardKind(is_ours=True, in_graph=True, branches="in batch"),
    "both-on-halves": ForwardKind(is_ours=True, in_graph=True, branches="in turn"),
}
"""Both branches of guidance, as a step evaluates them; halves need an even number of GPUs."""
ON_HALVES = "both-on-halves"


@dataclass(frozen=True, slots=True)
class ForwardCell:
    """One shape on so many GPUs in one way."""

    shape: ForwardShape
    degree: int
    way: str
    kind: ForwardKind

    @property
    def name(self) -> str:
        return f"{self.shape.name}/{self.degree}/{self.way}"

    @property
    def layout(self) -> Layout:
        """On the first GPUs."""
        ranks = tuple(range(self.degree))
        if self.way in HOST:
            return Layout(ranks, **{self.way.removeprefix("host-"): self.degree})
        cfg = 2 if self.way == ON_HALVES else 1
        return Layout(ranks, cfg=cfg, ulysses=self.degree // cfg)


@dataclass(frozen=True, slots=True)
class MeasuredForward:
    """A cell's result: the slowest rank's median, or why there is none."""

    cell: ForwardCell
    ms: float | None = None
    first_s: float | None = None
    peak_gb: float | None = None
    error: str | None = None


Found = tuple[Sequence[MeasuredForward], str, str]
"""Results, the GPUs and the commands that made them."""


def cells_of(*, num_gpus: int, only: Sequence[str] = ()) -> list[ForwardCell]:
    """All cells whose name fits one of the patterns, in an order that makes each transformer once.

    diffusers' own come first: what ours leaves in the process would change them.
    """
    degrees = [degree for degree in DEGREES if degree <= num_gpus]
    found = []
    for degree, model in itertools.product(degrees, (WAN, QWEN)):
        shapes = [shape for shape in SHAPES if shape.model == model]
        for way, kind in THEIRS.items():
            found += [ForwardCell(shape, degree, way, kind) for shape in shapes]
        for way, kind in UNEVEN.items():
            found += [ForwardCell(shape, degree, way, kind) for shape in shapes if shape.num_tokens % degree]
    for degree, model in itertools.product(degrees, (WAN, QWEN)):
        for way, kind in (OURS | BOTH | FP8 | HOST).items():
            if way not in (ON_HALVES, *HOST) or degree % 2 == 0:
                found += [ForwardCell(shape, degree, way, kind) for shape in SHAPES if shape.model == model]
    chosen = [cell for cell in found if is_wanted(cell.name, only)]
    return sorted(chosen, key=lambda cell: (cell.degree, cell.kind.is_ours, cell.way in HOST))


def measure_forwards(
    *,
    num_gpus: int,
    only: Sequence[str] = (),
    seconds: float | None = None,
    tell: Callable[[MeasuredForward], None] = lambda measured: None,
) -> list[MeasuredForward]:
    """Measures what is asked for, and begins no cell after so many seconds.

    Raises: InputError for more GPUs than there are, or patterns that fit nothing.
    """
    check_num_gpus(num_gpus)
    cells = cells_of(num_gpus=num_gpus, only=only)
    if not cells:
        raise InputError(f"--only {' '.join(only)}: fits no name such as {cells_of(num_gpus=1)[0].name}")
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast does not survive a killed peer
    deadline_s = time.monotonic() + (seconds or float("inf"))
    results: list[MeasuredForward] = []
    for (degree, is_far), group in itertools.groupby(cells, key=lambda cell: (cell.degree, cell.way in HOST)):
        for measured in _measured(degree, list(group), deadline_s, is_far=is_far):
            results.append(measured)
            tell(measured)
    return results


def _measured(
    degree: int, cells: Sequence[ForwardCell], deadline_s: float, *, is_far: bool
) -> Iterator[MeasuredForward]:
    """The cells of one degree, on processes of their own: NCCL's world has its size."""
    if time.monotonic() > deadline_s:
        return
    near = [(rank,) for rank in range(degree)] if is_far else None
    ranks = CudaRanks(degree, HOST_PLAN if is_far else GPU_PLAN, near=near)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for cell in cells:
                if time.monotonic() > deadline_s:
                    logger.warning("no time is left for %s and what follows", cell.name)
                    return
                number = ranks.next_dispatch(measure_forward.NUM_DISPATCHES)
                arguments = (cell.shape, cell.kind, cell.layout, number, f"{folder}/store")
                yield _summary(cell, ranks.run(cell.layout.ranks, measure_forward.measure, *arguments))
    finally:
        ranks.close()


def _summary(cell: ForwardCell, ranks: Sequence[dict[str, Any]]) -> MeasuredForward:
    errors = [rank["error"] for rank in ranks if "error" in rank]
    if errors:
        return MeasuredForward(cell, error=errors[0])
    return MeasuredForward(
        cell,
        ms=max(statistics.median(rank["times_ms"]) for rank in ranks),
        first_s=max(rank["first_s"] for rank in ranks),
        peak_gb=max(rank["peak_gb"] for rank in ranks),
    )


def table_of(results: Sequence[MeasuredForward], *, device: str, command: str) -> Iterator[str]:
    """Markdown: a table for each number of GPUs, then why cells are empty."""
    yield f"# Forwards of transformers, {time.strftime('%Y-%m-%d')}\n"
    yield f"{device}; command: `{command}`\n"
    yield (
        "Milliseconds per forward: one branch of guidance, batch 1, bf16, random weights; the slowest rank's "
        f"median of {measure_forward.REPEATS}. diffusers: as it comes, on several GPUs its context "
        "parallelism (Ulysses over NCCL; uneven: with `ulysses_anything`); compiled: "
        "`compile_repeated_blocks(dynamic=False)`. ours: fused blocks, nothing compiled; ours-graph: in a "
        "CUDA graph. One timestep for all tokens, for diffusers too, but where an image is given: there "
        "tokens of the first frame have another one. x: best of diffusers over best of ours in bf16. "
        "ours-fp8: products of the blocks in fp8; ours-fp8-attention: attention and its exchanges, too. "
        "host: exchanges through main memory, in a graph.\n"
    )
    alone = [each for each in results if each.cell.way not in BOTH]
    yield from _rows_of(alone, (*THEIRS, *UNEVEN, *OURS, *FP8, *HOST), "x", _gain)
    if both := [each for each in results if each.cell.way in BOTH]:
        yield (
            "Milliseconds for both branches of guidance, as a step evaluates them, in a CUDA graph: in turn, "
            "in one forward, or each on half of the GPUs; the prompts of Qwen-Image have "
            f"{' and '.join(map(str, measure_forward.TEXT_TOKENS[QWEN]))} tokens.\n"
        )
    yield from _rows_of(both, tuple(BOTH), "fastest", _fastest)
    for each in results:
        if each.error:
            yield f"- {each.cell.name}: {each.error}"


OfShape = Mapping[str, MeasuredForward]
"""By way."""


def _rows_of(
    results: Sequence[MeasuredForward],
    all_ways: Sequence[str],
    last: str,
    conclusion: Callable[[OfShape], str],
) -> Iterator[str]:
    """A table for each number of GPUs: a row for each shape, a column for each way that was measured."""
    for degree in sorted({each.cell.degree for each in results}):
        of_degree = [each for each in results if each.cell.degree == degree]
        ways = [way for way in all_ways if any(each.cell.way == way for each in of_degree)]
        yield head(counted(degree, "GPU"), *ways, last)
        for shape in dict.fromkeys(each.cell.shape for each in of_degree):
            found = {each.cell.way: each for each in of_degree if each.cell.shape == shape}
            yield row(shape.name, *(_number(found.get(way)) for way in ways), conclusion(found))
        yield ""


def _number(measured: MeasuredForward | None) -> str:
    if measured is None:
        return ""
    return "-" if measured.ms is None else f"{measured.ms:.1f}"


def _fastest(found: OfShape) -> str:
    known = {way: each.ms for way, each in found.items() if each.ms is not None}
    return min(known, key=known.__getitem__).removeprefix("both-") if len(known) > 1 else ""


def _gain(found: OfShape) -> str:
    known = {way: each.ms for way, each in found.items() if each.ms is not None}
    theirs, ours = ([known[way] for way in ways if way in known] for ways in (THEIRS | UNEVEN, OURS))
    return f"{min(theirs) / min(ours):.2f}" if theirs and ours else ""


def keep(results: Sequence[MeasuredForward], path: Path, *, device: str, command: str) -> Found:
    """Add results to those that earlier calls have left in a file; returns all, their GPUs and commands."""
    content: dict[str, Any] = {"device": "", "commands": [], "cells": {}}
    if path.exists():
        content = json.loads(path.read_text())
    content["device"] = max(content["device"], device, key=len)
    content["commands"] = [*dict.fromkeys([*content["commands"], command])]
    for each in results:
        values = asdict(each)
        del values["cell"]
        content["cells"][each.cell.name] = values
    path.write_text(json.dumps(content, indent=1) + "\n")
    cells = sorted(cells_of(num_gpus=max(DEGREES)), key=lambda cell: (cell.degree, SHAPES.index(cell.shape)))
    known = [cell for cell in cells if cell.name in content["cells"]]
    found = [MeasuredForward(cell, **content["cells"][cell.name]) for cell in known]
    return found, content["device"], "`, `".join(content["commands"])


@click.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all, 4 at most].")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help='Cells to run, such as "qwen-*/2/ours*". Repeatable.'
)
@click.option("--seconds", type=FiniteRange(0), help="Start no cell after this time.")
@click.option(
    "--to",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of cells; those of earlier calls stay.",
)
def main(*, gpus: int | None, only: tuple[str, ...], seconds: float | None, to: Path | None) -> None:
    """One forward of full-size Wan2.2-5B and Qwen-Image, compared with diffusers, on 1, 2 and 4 GPUs.

    A cell is SHAPE/GPUS/WAY, as in wan-832x480x49/4/ours-graph; the ways are diffusers,
    diffusers-compiled, diffusers-uneven, diffusers-uneven-compiled, ours, ours-graph, ours-fp8,
    ours-fp8-attention; host-torus, host-ring, host-ulysses; and for both branches of guidance both-in-turn,
    both-in-batch, both-on-halves.
    """
    from gfgen.gfc.cuda.driver import driver

    num_gpus = min(4, driver().num_devices) if gpus is None else gpus
    began_s = time.monotonic()
    patterns = "".join(f" --only '{pattern}'" for pattern in only)
    device = f"{num_gpus} x {driver().name(0)}"
    command = f"python -m benchmarks.forward --gpus {num_gpus}{patterns}"

    def tell(measured: MeasuredForward) -> None:
        result = measured.error or f"{measured.ms:.1f} ms (first {measured.first_s:.1f} s)"
        click.echo(f"{time.monotonic() - began_s:5.0f} s  {measured.cell.name}: {result}", err=True)
        if to is not None:
            keep([measured], to, device=device, command=command)  # whatever happens next

    results: Sequence[MeasuredForward] = measure_forwards(
        num_gpus=num_gpus, only=only, seconds=seconds, tell=tell
    )
    if to is not None:
        results, device, command = keep([], to, device=device, command=command)
    click.echo("\n".join(table_of(results, device=device, command=command)))


if __name__ == "__main__":
    main()
