"""`python -m benchmarks.attention`: attention shared by GPUs beside attention on one, in one run.

This process touches no GPU; the ranks do (benchmarks/measure_attention.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import measure_attention as measure
from benchmarks.measure_attention import AttentionVariant
from gfgen.bench.gfc import check_num_gpus
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.layout import Layout

SHAPES = {
    "Qwen-Image 512": 1024,
    "Wan2.2-5B 480x832x49": 5070,
    "Wan2.2-5B 480x832x81": 8190,
    "Qwen-Image 1536": 9216,
    "Wan2.2-5B 704x1280x81": 18480,
    "Wan2.2-5B 704x1280x121": 27280,
}
"""Tokens of the whole sequence."""
NUM_HEADS, HEAD_DIM = 24, 128
ULYSSES = (
    AttentionVariant(1, 132),
    *(AttentionVariant(chunks, blocks) for chunks in (2, 3) for blocks in (16, 24, 32, 48, 64)),
)
RINGS = tuple(AttentionVariant(1, blocks) for blocks in (16, 32, 64, 132))


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One shape on one layout; microseconds, the slowest rank."""

    shape: str
    num_tokens: int
    degrees: tuple[int, int]
    """Ulysses, ring."""
    alone_us: float
    """On one GPU."""
    local_us: float
    """What each rank computes, without an exchange."""
    times_us: dict[str, float]
    """Exchanges alone, eager, as shipped, and by variant."""

    @property
    def best(self) -> tuple[str, float]:
        """The fastest of the variants."""
        variants = {name: us for name, us in self.times_us.items() if " x " in name}
        name = min(variants, key=variants.__getitem__)
        return name, variants[name]


def measure_attention(*, num_gpus: int) -> list[AttentionRow]:
    """Every shape on 2 to `num_gpus` GPUs; about a minute on four.

    Raises: InputError where there are fewer than two GPUs.
    """
    check_num_gpus(num_gpus, at_least=2)
    ranks = CudaRanks(num_gpus, ArenaPlan(data_bytes=1 << 31, post_bytes=4 << 20))
    try:
        return [row for shape in SHAPES for row in _rows(ranks, shape, num_gpus)]
    finally:
        ranks.close()


def _rows(ranks: CudaRanks, shape: str, num_gpus: int) -> Iterator[AttentionRow]:
    num_tokens = SHAPES[shape]

    def local_us(num_heads: int, num_parts: int) -> float:
        (time_us,) = ranks.run(
            [0], measure.alone, ranks.next_dispatch(), num_tokens, num_heads, HEAD_DIM, num_parts
        )
        return float(time_us)

    alone_us = local_us(NUM_HEADS, 1)
    for degree in range(2, num_gpus + 1):
        for ulysses, ring in _degrees(degree):
            members = tuple(range(degree))
            times = ranks.run(
                members,
                measure.shared,
                Layout(members, ulysses=ulysses, ring=ring),
                ranks.next_dispatch(),
                num_tokens,
                NUM_HEADS,
                HEAD_DIM,
                ULYSSES if ring == 1 else RINGS,
            )
            slowest = {name: max(rank[name] for rank in times) for name in times[0]}
            local = local_us(NUM_HEADS // ulysses, ring)
            yield AttentionRow(shape, num_tokens, (ulysses, ring), alone_us, local, slowest)


def _degrees(degree: int) -> list[tuple[int, int]]:
    """(Ulysses, ring): one of both, and half of each."""
    return [(degree, 1), (1, degree), *([(degree // 2, 2)] if degree == 4 else [])]


def table_of(rows: Sequence[AttentionRow], *, device: str, command: str) -> Iterator[str]:
    """Markdown."""
    yield f"# Attention under sequence parallelism, {time.strftime('%Y-%m-%d')}\n"
    yield f"{device}; command: `{command}`\n"
    yield (
        f"Microseconds per call in a CUDA graph, medians, the slowest rank; bf16, {NUM_HEADS} heads of "
        f"{HEAD_DIM}. u x r: Ulysses and ring degree. local: what each rank computes (in a ring: two parts "
        "and their merging). moved: the exchanges alone. shipped: as the models run it; x: one GPU's time "
        "over it. hidden: how much of the exchange runs beside attention. best: of the variants tried "
        "(chunks of heads x blocks beside attention).\n"
    )
    yield "| shape | tokens | u x r | one GPU | local | moved | shipped | x | hidden | eager | best |"
    yield "|---" * 11 + "|"
    for row in rows:
        times, (name, best_us) = row.times_us, row.best
        hidden = (row.local_us + times["exchange"] - times["shipped"]) / times["exchange"]
        yield (
            f"| {row.shape} | {row.num_tokens} | {row.degrees[0]} x {row.degrees[1]} | {row.alone_us:.0f} | "
            f"{row.local_us:.0f} | {times['exchange']:.0f} | {times['shipped']:.0f} | "
            f"{row.alone_us / times['shipped']:.2f} | {hidden:.0%} | {times['eager']:.0f} | "
            f"{best_us:.0f} ({name}) |"
        )


def as_content(rows: Sequence[AttentionRow]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "shape": row.shape,
            "tokens": row.num_tokens,
            "ulysses": row.degrees[0],
            "ring": row.degrees[1],
            "alone_us": row.alone_us,
            "local_us": row.local_us,
            "times_us": row.times_us,
        }
        for row in rows
    ]


@click.command()
@click.option("--gpus", type=int, help="GPUs to use [default: all].")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for .json and .md.")
def main(*, gpus: int | None, output: Path | None) -> None:
    """Attention shared by GPUs: Ulysses, ring, both, and in chunks of heads."""
    from gfgen.gfc.cuda.driver import driver

    num_gpus = driver().num_devices if gpus is None else gpus
    rows = measure_attention(num_gpus=num_gpus)
    device = f"{num_gpus} x {driver().name(0)}"
    text = "\n".join(
        table_of(rows, device=device, command=f"python -m benchmarks.attention --gpus {num_gpus}")
    )
    click.echo(text)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        stem = f"{time.strftime('%Y-%m-%d')}-attention"
        (output / f"{stem}.json").write_text(json.dumps(as_content(rows), indent=1) + "\n")
        (output / f"{stem}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
