"""`python -m benchmarks.decode`: a VAE's decode on 1, 2 and 4 GPUs in one run, in fp32 and bf16.

Random weights and latents, the same on every rank. Each rank decodes the whole picture or video first; what
ranks decode together is compared with that. `python -m benchmarks.vae` compares with diffusers.

Legend: B batch, C channels, T H W latent frames, rows, columns.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.measured import MeasuredShape, head, host_s, is_wanted, keep, row
from gfgen.bench.gfc import check_num_gpus
from gfgen.cli.options import FiniteRange
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.descriptor import Descriptor
from gfgen.layout import Layout
from gfgen.models.families.pictures import to_uint8
from gfgen.models.fast import causal_vae
from gfgen.models.geometry.model import CONFIGS
from gfgen.models.loading.random_weights import random_component
from gfgen.models.parallel.parallel import Parallel, parallel_from
from gfgen.models.parallel.shared_decode import decode_rows, install
from gfgen.runtime.ipc.settings import GPU_PLAN

logger = logging.getLogger(__name__)

REPEATS = 3
"""Of a decode on several ranks, after a first one that does not count."""
REPEATS_ALONE = 1
"""Of one on a rank alone; all GPUs of the machine do it at the same time, each for itself."""

DecodeResult = dict[str, Any]
WAN, QWEN = "wan2.2-ti2v-5b", "qwen-image"


@dataclass(frozen=True, slots=True)
class DecodeShape(MeasuredShape):
    """What is decoded."""

    is_exact: bool = False
    """With fp32 as such; torch computes fp32 convolutions in TF32 unless told otherwise."""

    @property
    def variant(self) -> str:
        return "-exact" if self.is_exact else ""

    @property
    def latents(self) -> tuple[int, ...]:
        """[B, C, T, H, W]"""
        channels, factor = (16, 8) if self.model == QWEN else (48, 16)
        return 1, channels, (self.frames - 1) // 4 + 1, self.height // factor, self.width // factor


SHAPES = (
    DecodeShape(WAN, 256, 256, 9, is_exact=True),
    DecodeShape(WAN, 1280, 704, 81),
    DecodeShape(QWEN, 1024, 1024, 1),
)
DTYPES = ("float32", "bfloat16")
"""In this order: bf16 is compared with fp32."""
DEGREES = (8, 4, 2)
"""The most first: should time run out, those say most."""


# On each GPU ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Decode:
    """A VAE, what it is to decode, and what it made alone."""

    vae: Any
    latents_BCTHW: Tensor
    whole: Tensor | None = None
    frames: Tensor | None = None
    """What it made in fp32, as bytes."""


_KEPT: dict[DecodeShape, Decode] = {}
"""The last shape's, between calls: bands are compared with it."""


@torch.no_grad()
def alone(endpoint: CudaEndpoint, shape: DecodeShape, dtype: str) -> DecodeResult:
    """Times of a whole decode on this GPU; in bf16 also how far it is from fp32, measured before."""
    torch.cuda.set_device(endpoint.device)
    torch.backends.cudnn.allow_tf32 = not shape.is_exact
    if shape not in _KEPT:
        _KEPT.clear()
        gc.collect()
        torch.cuda.empty_cache()
        vae = random_component(
            CONFIGS / shape.model, "vae", device=str(endpoint.torch_device), dtype=torch.float32
        )
        install(vae)
        causal_vae.install(vae)
        _KEPT[shape] = Decode(vae, random_latents(shape.latents, endpoint.torch_device))
    decode = _KEPT[shape]
    torch.nn.Module.to(decode.vae, getattr(torch, dtype))  # diffusers' own warns that it casts
    torch.cuda.reset_peak_memory_stats()
    found = decode_alone(decode)
    return {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


@torch.no_grad()
def shared(endpoint: CudaEndpoint, shape: DecodeShape, layout: Layout, dispatch: int) -> DecodeResult:
    """Times of a decode with other GPUs, and how far this one's rows are from those of `alone`."""
    torch.cuda.set_device(endpoint.device)
    numbers = iter(range(dispatch, dispatch + REPEATS + 1))

    def meet() -> Parallel:
        group = endpoint.group(Descriptor(next(numbers), layout, (1,) * layout.degree))
        group.enter()
        return parallel_from(group)

    torch.cuda.reset_peak_memory_stats()
    found = decode_shared(_KEPT[shape], meet)
    endpoint.check(endpoint.last_dispatch)
    return {**found, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def random_latents(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Latents as a VAE takes them, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


def decode_alone(decode: Decode) -> DecodeResult:
    """A whole decode; the first one does not count."""
    latents_BCTHW = decode.latents_BCTHW.to(decode.vae.dtype)
    found: list[Any] = []
    times_s = []
    for _ in range(REPEATS_ALONE + 1):
        decode.whole = None
        times_s.append(host_s(lambda: found.append(decode_rows(decode.vae, latents_BCTHW, None))))
        decode.whole, _ = found.pop()
    assert decode.whole is not None
    frames = _bytes_of(decode.whole)
    psnr_db = None if decode.frames is None else psnr(frames, decode.frames)
    if decode.frames is None:
        decode.frames = frames
    return {
        "first_s": times_s[0],
        "times_s": times_s[1:],
        "spread": float(frames.float().std()),
        "psnr_db": psnr_db,
    }


def decode_shared(decode: Decode, meet: Callable[[], Parallel]) -> DecodeResult:
    """A decode of this rank's rows; the clock runs from when all ranks have come until this one is done."""
    assert decode.whole is not None
    latents_BCTHW = decode.latents_BCTHW.to(decode.vae.dtype)
    found: list[Any] = []
    times_s = []
    for _ in range(REPEATS + 1):
        parallel = meet()
        times_s.append(host_s(lambda: found.append(decode_rows(decode.vae, latents_BCTHW, parallel))))  # noqa: B023
        rows, first_row = found.pop()
    wanted = decode.whole[:, :, :, first_row : first_row + rows.shape[3]]
    apart = float((rows.float() - wanted.float()).abs().max())
    levels = (_bytes_of(rows).int() - _bytes_of(wanted).int()).abs()
    return {
        "first_s": times_s[0],
        "times_s": times_s[1:],
        "distance": apart / float(decode.whole.abs().max()),
        "max_levels": int(levels.max()),
        "psnr_db": psnr(_bytes_of(rows), _bytes_of(wanted)),
    }


def psnr(one: Tensor, other: Tensor) -> float:
    """Of bytes, in decibels; infinite where they are equal."""
    error = torch.zeros((), dtype=torch.float64, device=one.device)
    for a, b in zip(one, other, strict=True):  # a frame at a time: differences are eight times as large
        error += (a.double() - b.double()).square().mean() / len(one)
    return math.inf if error == 0 else 10 * math.log10(255**2 / float(error))


def _bytes_of(pixels: Tensor) -> Tensor:
    """[1, 3, T, H, W] in [-1, 1] as uint8 [T, H, W, 3], as an adapter makes it."""
    return to_uint8((pixels[0].permute(1, 0, 2, 3).float() / 2 + 0.5).clamp(0, 1))


# In the process that asks ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One shape in one dtype on so many GPUs; of several ranks the slowest, or the farthest."""

    shape: str
    dtype: str
    degree: int
    seconds: float
    """The median."""
    first_s: float
    peak_gb: float
    distance: float | None = None
    """From the decode of one GPU, in units of the largest magnitude."""
    max_levels: int | None = None
    """The same of bytes."""
    psnr_db: float | None = None
    """On one GPU: of bf16 to fp32; on several: to one GPU in the same dtype."""
    spread: float | None = None
    """Standard deviation of the bytes: how much there is to differ."""


def measure_decodes(
    *,
    num_gpus: int,
    only: Sequence[str] = (),
    seconds: float | None = None,
    tell: Callable[[DecodeRow], None] = lambda row: None,
) -> list[DecodeRow]:
    """Shapes in all dtypes, on one GPU and on each power of two of them; no row begins after `seconds`.

    only: patterns of "shape/dtype/GPUs". One GPU is measured for each dtype that fits, since the others are
    compared with it; without float32, bf16 has no PSNR.

    Raises: InputError for more GPUs than there are.
    """
    check_num_gpus(num_gpus)
    deadline_s = time.monotonic() + (math.inf if seconds is None else seconds)
    rows: list[DecodeRow] = []
    ranks = CudaRanks(num_gpus, GPU_PLAN)
    try:
        for row in _measured(ranks, num_gpus, only):
            rows.append(row)
            tell(row)
            if time.monotonic() > deadline_s:
                logger.warning("no time is left for what follows %s in %s", row.shape, row.dtype)
                break
    finally:
        ranks.close()
    order = [(shape.name, dtype) for shape in SHAPES for dtype in DTYPES]
    return sorted(rows, key=lambda row: (order.index((row.shape, row.dtype)), row.degree))


def _measured(ranks: CudaRanks, num_gpus: int, only: Sequence[str]) -> Iterator[DecodeRow]:
    """A row when it is asked for."""
    for shape in SHAPES:
        for dtype in DTYPES[:1] if shape.is_exact else DTYPES:
            name = f"{shape.name}/{dtype}"
            degrees = [each for each in DEGREES if each <= num_gpus and is_wanted(f"{name}/{each}", only)]
            if degrees or is_wanted(f"{name}/1", only):
                results = ranks.run(range(num_gpus), alone, shape, dtype)
                yield _row(shape, dtype, 1, results)
                for degree in degrees:
                    yield _row(shape, dtype, degree, _side_by_side(ranks, num_gpus, shape, degree))


def _side_by_side(ranks: CudaRanks, num_gpus: int, shape: DecodeShape, degree: int) -> list[dict[str, Any]]:
    """Groups of so many ranks, all at the same time."""
    starts = range(0, num_gpus - degree + 1, degree)
    layouts = [Layout.bands(tuple(range(start, start + degree))) for start in starts]
    number = ranks.next_dispatch(REPEATS + 1)
    for layout in layouts:
        for rank in layout.ranks:
            ranks.submit(rank, shared, shape, layout, number)
    return [ranks.result(rank) for layout in layouts for rank in layout.ranks]


def _row(shape: DecodeShape, dtype: str, degree: int, results: Sequence[dict[str, Any]]) -> DecodeRow:
    def most(name: str) -> Any:
        values = [result[name] for result in results if result.get(name) is not None]
        return max(values) if values else None

    psnrs = [result["psnr_db"] for result in results if result["psnr_db"] is not None]
    # On several GPUs a decode has ended when the last of them has.
    medians = [statistics.median(result["times_s"]) for result in results]
    return DecodeRow(
        shape.name,
        dtype,
        degree,
        seconds=statistics.median(medians) if degree == 1 else max(medians),
        first_s=most("first_s"),
        peak_gb=most("peak_gb"),
        distance=most("distance"),
        max_levels=most("max_levels"),
        psnr_db=min(psnrs) if psnrs else None,
        spread=most("spread"),
    )


def table_of(rows: Sequence[DecodeRow], *, device: str, command: str) -> Iterator[str]:
    """Markdown: a line for each row."""
    yield f"# Decodes of VAEs, {time.strftime('%Y-%m-%d')}\n"
    yield f"{device}; command: `{command}`\n"
    yield (
        "Seconds per decode, random weights and latents. On one GPU the median over all GPUs, which decode "
        f"at the same time, each {REPEATS_ALONE + 1} times, the first uncounted; on several the slowest "
        f"rank's median of {REPEATS}. fp32 convolutions in TF32, torch's default, but for shapes called "
        "exact. apart: the largest difference of pixels from one GPU's decode in the same dtype, over the "
        "largest magnitude; levels: of bytes. PSNR: of bytes, on one GPU of bf16 to fp32, on several to one "
        "GPU in the same dtype; what random weights draw tells little about pictures.\n"
    )
    yield head("shape", "dtype", "GPUs", "s", "x", "first s", "peak GB", "apart", "levels", "PSNR dB")
    alone = {(each.shape, each.dtype): each.seconds for each in rows if each.degree == 1}
    for each in rows:
        gain = alone[each.shape, each.dtype] / each.seconds
        numbers = [f"{each.seconds:.3f}", f"{gain:.2f}", f"{each.first_s:.1f}", f"{each.peak_gb:.1f}"]
        compared = {".1e": each.distance, "d": each.max_levels, ".1f": each.psnr_db}
        numbers += ["" if value is None else format(value, form) for form, value in compared.items()]
        yield row(each.shape, each.dtype, each.degree, *numbers)


@click.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option("--only", multiple=True, metavar="PATTERN", help='Rows, such as "*/bfloat16/4". Repeatable.')
@click.option("--seconds", type=FiniteRange(0), help="Start no measurement after this time.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json and .md.")
def main(*, gpus: int | None, only: tuple[str, ...], seconds: float | None, output: Path | None) -> None:
    """Decodes of full-size Wan2.2-5B and Qwen-Image in fp32 and bf16, on 1, 2, 4 and 8 GPUs.

    Compares the result of several GPUs, each with a band of rows, with the result of one GPU.
    """
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    began_s = time.monotonic()

    def tell(row: DecodeRow) -> None:
        click.echo(
            f"{time.monotonic() - began_s:5.0f} s  {row.shape}/{row.dtype}/{row.degree}: {row.seconds:.3f} s",
            err=True,
        )

    rows = measure_decodes(num_gpus=num_gpus, only=only, seconds=seconds, tell=tell)
    device = f"{num_gpus} x {driver().name(0)}"
    patterns = "".join(f" --only '{pattern}'" for pattern in only)
    command = f"python -m benchmarks.decode --gpus {num_gpus}{patterns}"
    text = "\n".join(table_of(rows, device=device, command=command))
    click.echo(text)
    keep(output, "decode", [asdict(row) for row in rows], text)


if __name__ == "__main__":
    main()
