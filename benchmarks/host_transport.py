"""Exchanges through main memory beside peer memory and NCCL, on two GPUs of one machine.

    python -m benchmarks.host_transport FOLDER                  # two GPUs, at most eight minutes
    python -m benchmarks.host_transport FOLDER --seconds 0      # the tables of what is there
    python -m benchmarks.host_transport FOLDER --rehearse       # the same on CPU ranks, with small shapes

Checks come first. Each row is written to FOLDER/rows.jsonl when it is measured; what is there is not measured
again, so a run that was cut off can go on. This process touches no GPU; the ranks do (measure_host.py, and
measure_nccl.py for diffusers' attention over NCCL without peer access).
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import measure_host
from benchmarks.measure_forward import TEXT_TOKENS, Branches, ForwardShape
from gfgen.gfc.arena import CONTROL_PLAN, ArenaPlan, create_arena
from gfgen.gfc.cuda.device_arena import arena_bytes
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.endpoint import Endpoint
from gfgen.layout import Layout
from gfgen.runtime.ipc.settings import GPU_PLAN, HOST_PLAN

KIB, MIB = 1 << 10, 1 << 20
EXACT = ((1, 2, 8), (3, 5, 3), (33, 24, 64), (5070, 24, 128), (18480, 24, 128), (96000, 24, 128))
"""Tokens, heads, head dimension; the last needs several rounds."""
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
TOKENS, DIMS, HEADS = (18480, 96000, 192000), (128, 64, 32), 24
TRANSPORTS = ("peer", "host")
LINKS = (0, 25, 12)
"""Limits of the host transport in GB/s; 0: none."""
OVER = (("peer", 0), *(("host", link) for link in LINKS))
WAYS = {
    "torus": Layout((0, 1), torus=2),
    "ring": Layout((0, 1), ring=2),
    "ulysses": Layout((0, 1), ulysses=2),
}
WAN, QWEN = "wan2.2-ti2v-5b", "qwen-image"
SHAPES = (
    ForwardShape(WAN, 832, 480, 49),
    ForwardShape(WAN, 1280, 704, 81),
    ForwardShape(QWEN, 1536, 1536, 1),
)
LAYERS, BLOCK_HEADS, BLOCK_DIM = {WAN: 30, QWEN: 60}, 24, 128
LATENT_BYTES = {WAN: 4 * 48 * 2, QWEN: 64 * 2}
"""Of a token's prediction, which halves of a guided step exchange."""
GOALS = {
    "wan-832x480x49": 1.4, "wan-1280x704x81": 1.75, "qwen-1536x1536": 1.5, "cfg 2": 1.9, "over NCCL": 1.6,
}  # fmt: skip

Run = Callable[..., list[Any]]
"""A program on both ranks."""


@dataclass(slots=True)
class Rows:
    """What was measured, kept in a file row by row; what is there already is not measured again."""

    path: Path
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            row = json.loads(line)
            self.found[row["name"]] = row

    def add(self, name: str, **values: Any) -> None:
        self.found[name] = {"name": name, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(self.found[name]) + "\n")
        click.echo(f"{name}: " + ", ".join(f"{key} {_short(value)}" for key, value in values.items()))

    def value(self, name: str, key: str = "us") -> float | None:
        return self.found.get(name, {}).get(key)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def on_gpus() -> tuple[CudaRanks, Run]:
    """Two ranks with an endpoint for each transport."""
    ranks = CudaRanks(2, GPU_PLAN)
    size = arena_bytes(HOST_PLAN)
    arenas = {rank: create_arena(HOST_PLAN, rank=rank, incarnation=1, num_bytes=size) for rank in (0, 1)}
    pages = {rank: create_arena(CONTROL_PLAN, rank=rank, incarnation=1) for rank in (0, 1)}
    for rank in (0, 1):
        ranks.submit(rank, measure_host.add_host, HOST_PLAN, os.getpid(), arenas, pages[rank])
    for rank in (0, 1):
        ranks.result(rank)
    return ranks, lambda program, *arguments: ranks.run((0, 1), program, *arguments)


def on_cpus() -> Run:
    """Two CPU ranks for each program: both transports are arenas in main memory."""
    context = multiprocessing.get_context("fork")
    plan = ArenaPlan(data_bytes=4 * MIB)

    def run(program: Callable[..., Any], *arguments: Any) -> list[Any]:
        arenas = {
            transport: {rank: create_arena(plan, rank=rank, incarnation=1) for rank in (0, 1)}
            for transport in TRANSPORTS
        }

        def serve(rank: int, pipe: Any) -> None:
            torch.set_num_threads(1)
            incarnations = {0: 1, 1: 1}
            for transport, fds in arenas.items():
                endpoint = Endpoint(plan, rank=rank, fds=fds, incarnations=incarnations)
                measure_host._ENDPOINTS[transport] = endpoint
            pipe.send(program(endpoint, *arguments))

        pipes = [context.Pipe() for _ in range(2)]
        processes = [context.Process(target=serve, args=(rank, pipe[1])) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        for fd in [fd for fds in arenas.values() for fd in fds.values()]:
            os.close(fd)
        found = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
        return found

    return run


@dataclass(slots=True)
class Measuring:
    """One run: ranks, what they have found, and when to stop."""

    run: Run
    rows: Rows
    ends_s: float
    has_gpus: bool
    tokens: Sequence[int] = TOKENS
    dims: Sequence[int] = DIMS
    sizes: Sequence[int] = SIZES
    shapes: Sequence[ForwardShape] = SHAPES
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1, 100_000))

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def _slower(self, name: str, program: Callable[..., Any], *arguments: Any) -> None:
        """One row: microseconds of the slower rank."""
        if name not in self.rows.found and self.left_s > 0:
            self.rows.add(name, us=max(self.run(program, next(self.numbers), *arguments)))

    def check(self, exact: Sequence[tuple[int, int, int]], *, tokens: int, count: int) -> None:
        """Raises: SystemExit if anything is wrong, since times would mean nothing."""
        if "checks" in self.rows.found:
            return
        found = self.run(measure_host.wrong_bytes, next(self.numbers), exact)
        wrong = [each for part in found for each in part]
        mixed = sum(self.run(measure_host.mixed_sequences, next(self.numbers), count, 5))
        bits = [
            self.run(measure_host.attention_bits, next(self.numbers), tokens, HEADS, link)[0]
            for link in (0, 12)
        ]
        same = all(value for each in bits for name, value in each.items() if name.endswith("bits"))
        if wrong or mixed or not same:
            raise SystemExit(f"WRONG: exact bytes {wrong}; {mixed} items of {count} dispatches; {bits}")
        self.rows.add("checks", shapes=len(exact), dispatches=count, bits=bits)

    def exchanges(self) -> None:
        for size, (transport, link) in itertools.product(self.sizes, OVER):
            name = f"exchange {size} {transport} {link}"
            self._slower(name, measure_host.exchange_us, transport, link, size)

    def attention(self, tokens: int) -> None:
        """On one GPU, half of its heads there, and shared by two."""
        for dim in self.dims:
            for label, heads in (("alone", HEADS), ("half", HEADS // 2)):
                name = f"attention {tokens} {dim} {label}"
                self._slower(name, measure_host.attention_us, "host", 0, None, tokens, heads, dim)
            for (way, layout), (transport, link) in itertools.product(WAYS.items(), OVER):
                if way == "ulysses" and (link or tokens == max(self.tokens)):
                    continue
                name = f"attention {tokens} {dim} {way} {transport} {link}"
                what = (transport, link, layout, tokens, HEADS, dim)
                self._slower(name, measure_host.attention_us, *what)

    def forwards(self) -> None:
        """Each transformer is made once for one GPU and once for two."""
        kinds: tuple[Branches, ...] = ("one", "in turn")
        for model in dict.fromkeys(shape.model for shape in self.shapes):
            cases = [(each, kind) for each in self.shapes if each.model == model for kind in kinds]
            for shape, branches in cases:
                self._forward(shape, branches, "alone", None, "host", (0,))
            for shape, branches in cases:
                ways = WAYS if branches == "one" else {"cfg": Layout((0, 1), cfg=2)}
                for (way, layout), transport in itertools.product(ways.items(), TRANSPORTS):
                    links = LINKS if transport == "host" and way != "ulysses" else (0,)
                    self._forward(shape, branches, way, layout, transport, links)

    def _forward(
        self,
        shape: ForwardShape,
        branches: Branches,
        way: str,
        layout: Layout | None,
        transport: str,
        links: Sequence[int],
    ) -> None:
        names = {link: f"forward {shape.name} {branches} {way} {transport} {link}" for link in links}
        if self.left_s < 15 * self.has_gpus or set(names.values()) <= self.rows.found.keys():
            return
        given = (transport, links, layout, shape, branches)
        found = self.run(measure_host.forward_ms, next(self.numbers), *given)
        if errors := [each["error"] for each in found if "error" in each]:
            click.echo(f"{names[links[0]]}: {errors[0]}")
            return
        for link, name in names.items():
            self.rows.add(name, us=1e3 * max(each[str(link)] for each in found))

    def nccl(self, *, seconds: float) -> None:
        """diffusers' attention over NCCL, in processes of their own."""
        cases = [
            (tokens, HEADS, dim)
            for tokens, dim in itertools.product(self.tokens, self.dims)
            if f"nccl {tokens} {dim} ring" not in self.rows.found
        ]
        if not cases or self.left_s < 1:
            return
        env = os.environ | {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "rows"
            words = [sys.executable, "-m", "benchmarks.measure_nccl", "--store", f"{folder}/store"]
            words += ["--device", "cuda" if self.has_gpus else "cpu", "--cases", json.dumps(cases)]
            words += ["--output", str(output), "--seconds", str(min(seconds, self.left_s))]
            ranks = [subprocess.Popen([*words, "--rank", str(rank)], env=env) for rank in (0, 1)]
            try:
                for rank in ranks:
                    rank.wait(timeout=min(seconds, self.left_s) + 40)
            except subprocess.TimeoutExpired:
                click.echo("the ranks of NCCL took too long")
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
            for line in output.read_text().splitlines() if output.exists() else ():
                row = json.loads(line)
                name = f"nccl {row.pop('tokens')} {row.pop('dim')} {row.pop('way')}"
                self.rows.add(name, **row)


# Tables ---------------------------------------------------------------------------------------------


def tables(rows: Rows) -> Iterator[str]:
    """Markdown of what was measured."""
    yield "\n| bytes each way | over | limit, GB/s | us | GB/s |\n|---|---|---|---|---|"
    for row in rows.found.values():
        if row["name"].startswith("exchange"):
            _, size, transport, link = row["name"].split()
            rate = int(size) / row["us"] / 1e3
            yield f"| {int(size):,} | {transport} | {_limit(link)} | {row['us']:.1f} | {rate:.1f} |"
    yield from _attention_table(rows)
    yield from _nccl_table(rows)
    yield from _forward_table(rows)


def _limit(link: str | int) -> str:
    return str(link) if int(link) else "-"


def _rate(rows: Rows, transport: str, link: str | int) -> float:
    """Bytes a microsecond of the largest exchange that was measured; infinite if none was."""
    found = [
        int(row["name"].split()[1]) / row["us"]
        for row in rows.found.values()
        if row["name"].startswith("exchange") and row["name"].endswith(f" {transport} {link}")
    ]
    return found[-1] if found else math.inf


def _attention_table(rows: Rows) -> Iterator[str]:
    yield "\nBound: one GPU's time over that of half of the heads, or of the exchange if that is longer."
    header = (
        "| tokens | dim | one GPU, ms | half | way | over | limit, GB/s | MB each way | ms | gain | bound |"
    )
    yield f"{header}\n{'|---' * 11}|"
    for row in rows.found.values():
        words = row["name"].split()
        if words[0] != "attention" or len(words) < 6:
            continue
        _, tokens, dim, way, transport, link = words
        alone, half = (rows.value(f"attention {tokens} {dim} {each}") for each in ("alone", "half"))
        if alone is None or half is None:
            continue
        moved = _attention_bytes(int(tokens), HEADS, int(dim))
        bound = alone / max(half, moved / _rate(rows, transport, link))
        yield (
            f"| {int(tokens):,} | {dim} | {alone / 1e3:.2f} | {half / 1e3:.2f} | {way} | {transport} | "
            f"{_limit(link)} | {moved / 1e6:.0f} | {row['us'] / 1e3:.2f} | {alone / row['us']:.2f} | "
            f"{bound:.2f} |"
        )


def _attention_bytes(tokens: int, heads: int, dim: int) -> float:
    """What each of two ranks sends: queries, keys and values of the other's heads, and results; in a ring
    keys and values of all heads, which are as many bytes.
    """
    return 4 * (tokens / 2) * (heads / 2) * dim * 2


def _nccl_table(rows: Rows) -> Iterator[str]:
    yield (
        "\ndiffusers over NCCL without peers: the faster one of its Ulysses and ring. A: attention on two "
        "without exchanges; X: the exchange alone over NCCL. Goal: 1.6 times at 18,480 tokens of 128, "
        "elsewhere 85% of (A + X) / A."
    )
    header = (
        "| tokens | dim | diffusers, ms | by | A | X | GB/s | ours, ms | by | times | (A + X) / A | share |"
    )
    yield f"{header}\n{'|---' * 12}|"
    for tokens, dim in sorted(
        {
            tuple(map(int, row["name"].split()[1:3]))
            for row in rows.found.values()
            if row["name"][:4] == "nccl"
        }
    ):
        theirs = {way: rows.found.get(f"nccl {tokens} {dim} {way}") for way in ("ulysses", "ring")}
        best = min((row for row in theirs.values() if row), key=lambda row: row["us"])
        ours = {way: rows.value(f"attention {tokens} {dim} {way} host 0") for way in WAYS}
        times = {way: us for way, us in ours.items() if us is not None}
        half = rows.value(f"attention {tokens} {dim} half")
        if not times or half is None:
            continue
        way = min(times, key=lambda each: times[each])
        bound, gain = (half + best["exchange_us"]) / half, best["us"] / times[way]
        rate = _attention_bytes(tokens, HEADS, dim) / best["exchange_us"] / 1e3
        yield (
            f"| {tokens:,} | {dim} | {best['us'] / 1e3:.2f} | {best['name'].split()[-1]} | "
            f"{half / 1e3:.2f} | {best['exchange_us'] / 1e3:.2f} | {rate:.1f} | "
            f"{times[way] / 1e3:.2f} | {way} | {gain:.2f} | {bound:.2f} | {gain / bound:.0%} |"
        )


def _forward_table(rows: Rows) -> Iterator[str]:
    yield "\nBound: one GPU's time over half of it, or over the time of the exchanges if that is longer."
    header = "| forward | one GPU, ms | way | over | limit, GB/s | MB each way | ms | gain | bound | goal |"
    yield f"{header}\n{'|---' * 10}|"
    for shape, branches in itertools.product(SHAPES, ("one", "in turn")):
        prefix = f"forward {shape.name} {branches}"
        alone = rows.value(f"{prefix} alone host 0")
        for row in rows.found.values():
            if alone is None or not row["name"].startswith(prefix) or " alone " in row["name"]:
                continue
            way, transport, link = row["name"].removeprefix(prefix).split()
            moved = _forward_bytes(shape, way)
            bound = alone / max(alone / 2, moved / _rate(rows, transport, link))
            goal = GOALS["cfg 2" if way == "cfg" else shape.name]
            yield (
                f"| {shape.name}{', guided' if way == 'cfg' else ''} | {alone / 1e3:.1f} | {way} | "
                f"{transport} | {_limit(link)} | {moved / 1e6:.0f} | {row['us'] / 1e3:.1f} | "
                f"{alone / row['us']:.2f} | {bound:.2f} | {goal} |"
            )


def _forward_bytes(shape: ForwardShape, way: str) -> float:
    if way == "cfg":
        return float(shape.num_tokens * LATENT_BYTES[shape.model])
    joint = TEXT_TOKENS[shape.model][0] if shape.model == QWEN else 0
    return LAYERS[shape.model] * _attention_bytes(shape.num_tokens + joint, BLOCK_HEADS, BLOCK_DIM)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--rehearse", is_flag=True, help="On CPU ranks, with small shapes.")
@click.option("--seconds", type=float, default=430.0, help="Begin nothing after so many; 0: tables only.")
def main(folder: Path, rehearse: bool, seconds: float) -> None:
    began_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    rows = Rows(folder / "rows.jsonl")
    ends_s = began_s + seconds
    if rehearse:
        measuring = Measuring(on_cpus(), rows, ends_s, has_gpus=False)
        measuring.tokens, measuring.dims, measuring.sizes = (64, 130), (16,), (256, 4096)
        measuring.check(EXACT[:3], tokens=203, count=300)
        measure(measuring)
    elif seconds > 0:
        ranks, run = on_gpus()
        try:
            measuring = Measuring(run, rows, ends_s, has_gpus=True)
            measuring.check(EXACT, tokens=5070, count=10_000)
            measure(measuring)
        finally:
            ranks.close()
    text = "\n".join(tables(rows))
    (folder / "tables.md").write_text(text + "\n")
    click.echo(text)
    click.echo(f"\n{time.monotonic() - began_s:.0f} s")


def measure(measuring: Measuring) -> None:
    """What is most wanted comes first."""
    measuring.exchanges()
    for tokens in measuring.tokens[:-1]:
        measuring.attention(tokens)
    measuring.nccl(seconds=90)
    measuring.forwards()
    measuring.attention(measuring.tokens[-1])


if __name__ == "__main__":
    main()
