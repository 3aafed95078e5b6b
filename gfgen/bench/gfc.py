"""`gfgen bench gfc`: group-free collectives and NCCL on this machine's GPUs (gfgen/gfc/cuda/measure.py)."""

from __future__ import annotations

import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gfgen.errors import InputError
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda import measure
from gfgen.gfc.cuda.driver import driver
from gfgen.gfc.cuda.rank_processes import CudaRanks
from gfgen.gfc.cuda.selector import FLAGGED_LIMIT, KernelChoice, Rule, Selector, TableKey, store_rules
from gfgen.runtime.core.devices import by_reach
from gfgen.runtime.ipc.settings import HOST_PLAN
from gfgen.runtime.predict.links import keep_links
from gfgen.system.wording import counted, table_head, table_row

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
LINK_SIZES = [4 * KIB, 256 * KIB, 4 * MIB, 64 * MIB]
FUSED = {"Wan2.2-5B 704x1280x81": 18480, "Qwen-Image 512": 1024, "Qwen-Image 1536": 9216}
NUM_HEADS, HEAD_DIM = 24, 128
PAIR_SIZES = [KIB << shift for shift in (0, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)]
CHOICES = [
    KernelChoice("flagged", 32),
    KernelChoice("flagged", 132),
    KernelChoice("threads", 132),
    *(KernelChoice("bulk", 132, tile << 10) for tile in (8, 16, 24, 48)),
    *(KernelChoice("bulk", 132, tile << 10, in_turn=True) for tile in (16, 24, 48)),
]
MeasuredRow = dict[str, Any]
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class CollectivesReport:
    facts: dict[str, Any]
    cells: list[MeasuredRow] = field(default_factory=list)
    fused: list[MeasuredRow] = field(default_factory=list)
    groups: list[MeasuredRow] = field(default_factory=list)
    barriers: list[MeasuredRow] = field(default_factory=list)
    tuning: list[MeasuredRow] = field(default_factory=list)
    links: list[MeasuredRow] = field(default_factory=list)
    """Between any two GPUs, by transport and bytes."""

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"


def check_num_gpus(num_gpus: int, *, at_least: int = 1) -> None:
    """Raises: InputError for more GPUs than there are, or fewer than the benchmark needs."""
    found = driver().num_devices
    if not at_least <= num_gpus <= found:
        needed = f"this needs {at_least} at least; " if at_least > 1 else ""
        raise InputError(f"--gpus {num_gpus}: {needed}this machine has {counted(found, 'NVIDIA GPU')}")


def measure_collectives(*, num_gpus: int, tune: bool) -> CollectivesReport:
    """All measurements, a minute on four GPUs; links alone where some GPUs do not reach each other.

    Keeps the rates of links for predictions. Raises: InputError where there are fewer than two GPUs.
    """
    check_num_gpus(num_gpus, at_least=2)
    near = by_reach(num_gpus, driver().can_access).near
    if tune and len(near) > 1:
        _log.warning(
            "--tune has no effect: it is for peer memory, and these GPUs do not all reach each other"
        )
    facts = {"date": time.strftime("%Y-%m-%d"), "device": f"{num_gpus} x {driver().name(0)}"}
    report = CollectivesReport(facts) if len(near) > 1 else _measured(num_gpus, tune=tune)
    if len(near) < num_gpus:
        report.links += _links(num_gpus, "peer", near, near)
    report.links += _links(num_gpus, "host", [(each,) for each in range(num_gpus)], [range(num_gpus)])
    small, large = min(LINK_SIZES), max(LINK_SIZES)
    us = {(row["transport"], *row["pair"], row["bytes"]): row["us"] for row in report.links}
    keep_links(
        driver().name(0),
        [
            {"transport": at, "from": one, "to": two, "gb_per_s": large / us[at, one, two, large] / 1e3}
            | {"us": us[at, one, two, small]}
            for at, one, two, size in us
            if size == small
        ],
    )
    return report


def _links(
    num_gpus: int, transport: str, near: Sequence[Sequence[int]], sets: Sequence[Sequence[int]]
) -> Iterator[MeasuredRow]:
    """Of each pair inside these sets of GPUs."""
    pairs = [pair for each in sets for pair in itertools.combinations(each, 2)]
    ranks = CudaRanks(num_gpus, HOST_PLAN, near=near if len(near) > 1 else None)
    try:
        for pair, size in itertools.product(pairs, LINK_SIZES):
            found = ranks.run(pair, measure.link_us, pair, ranks.next_dispatch(), size)
            yield {"transport": transport, "pair": pair, "bytes": size, **_slowest(found)}
    finally:
        ranks.close()
    _log.info("measured links, %s", transport)


def _measured(num_gpus: int, *, tune: bool) -> CollectivesReport:
    largest = num_gpus * max(SIZES)
    plan = ArenaPlan(data_bytes=int(2.1 * largest), post_bytes=8 * MIB)
    ranks = CudaRanks(num_gpus, plan)
    try:
        bench = _Bench(ranks, num_gpus)
        report = bench.report
        if tune:
            bench.tune()
            _log.info("tuned")
        bench.start_nccl()
        bench.measure_groups()
        _log.info("measured new groups")
        for degree in range(2, num_gpus + 1):
            bench.measure_degree(degree)
            _log.info("measured %d GPUs", degree)
        return report
    finally:
        ranks.close()


class _Bench:
    def __init__(self, ranks: CudaRanks, num_gpus: int) -> None:
        self.ranks, self.num_gpus = ranks, num_gpus
        (versions,) = ranks.run([0], measure.versions)
        (copy_rate,) = ranks.run([0], measure.copy_engine, 1, 64 * MIB)
        self.name = name = driver().name(0)
        self.report = CollectivesReport(
            {
                "date": time.strftime("%Y-%m-%d"),
                "device": f"{num_gpus} x {name}",
                "copy_engine_gb_per_s": copy_rate,
                "nccl_nvls": os.environ.get("NCCL_NVLS_ENABLE", "default"),
                **versions,
            }
        )

    def tune(self) -> None:
        """Fills the selector: at each message size, what is best for both patterns together."""
        rules: dict[TableKey, tuple[Rule, ...]] = {}
        for degree in range(2, self.num_gpus + 1):
            members = tuple(range(degree))
            rows = []
            for pair_bytes in PAIR_SIZES:
                dispatch = self.ranks.next_dispatch()
                times = self.ranks.run(members, measure.tune_cell, members, dispatch, pair_bytes, CHOICES)
                slowest = [
                    [max(rank[idx][k] for rank in times) for k in range(4)] for idx in range(len(CHOICES))
                ]
                rows.append(slowest)
                row = {"degree": degree, "pair_bytes": pair_bytes, "us": slowest}
                self.report.tuning.append(row)
            _log.info("tuned %d GPUs", degree)
            for in_arena, columns in ((True, (0, 1)), (False, (2, 3))):
                rules[degree, in_arena] = _rules(rows, columns)
        path = store_rules(self.name, rules)
        self.report.facts["selector"] = path.name
        self.ranks.run(range(self.num_gpus), measure.use_rules, Selector(rules, has_bulk=True))

    def start_nccl(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            self.ranks.run(range(self.num_gpus), measure.init_nccl, self.num_gpus, store)
            for degree in range(2, self.num_gpus + 1):
                members = tuple(range(degree))
                costs = self.ranks.run(range(self.num_gpus), measure.new_nccl_group, members)
                self.report.groups.append({"degree": degree, "nccl": _slowest(costs)})

    def measure_groups(self) -> None:
        for row in self.report.groups:
            subsets = list(itertools.permutations(range(self.num_gpus), row["degree"]))
            chosen = list(itertools.islice(itertools.cycle(subsets), 240))
            first = self.ranks.next_dispatch(len(chosen))
            dispatches = list(zip(chosen, range(first, first + len(chosen)), strict=True))
            row["ours"] = _slowest(self.ranks.run(range(self.num_gpus), measure.group_cost, dispatches))

    def measure_degree(self, degree: int) -> None:
        members = tuple(range(degree))

        def run(program: Any, *arguments: Any) -> MeasuredRow:
            dispatch = self.ranks.next_dispatch()
            return _slowest(self.ranks.run(members, program, members, dispatch, *arguments))

        for pattern, size in itertools.product(measure.PATTERNS, SIZES):
            times = run(measure.cell, pattern, size)
            self.report.cells.append({"pattern": pattern, "degree": degree, "bytes": size, **times})
        self.report.barriers.append({"degree": degree, **run(measure.barrier_cell)})
        for model, tokens in FUSED.items():
            if tokens % degree == 0:  # NCCL's equal all-to-all takes nothing else
                times = run(measure.fused_cell, tokens, NUM_HEADS, HEAD_DIM)
                self.report.fused.append({"model": model, "degree": degree, "tokens": tokens, **times})


def _slowest(found: Sequence[dict[str, float]]) -> MeasuredRow:
    """By key, the largest over the ranks that took part; for checks, the smallest."""
    found = [times for times in found if times]
    return {key: (min if key == "is_equal" else max)(times[key] for times in found) for key in found[0]}


def _rules(rows: Sequence[Sequence[Sequence[float]]], columns: tuple[int, int]) -> tuple[Rule, ...]:
    """A rule per message size, neighbours with the same choice joined."""
    rules: list[Rule] = []
    for idx, slowest in enumerate(rows):
        # Flags are not for messages beyond their inboxes: what was timed there is the fallback.
        candidates = [
            (choice, times)
            for choice, times in zip(CHOICES, slowest, strict=True)
            if choice.path != "flagged" or PAIR_SIZES[idx] <= FLAGGED_LIMIT
        ]
        best = [min(times[column] for _, times in candidates) for column in columns]
        scores = [
            sum(times[column] / least for column, least in zip(columns, best, strict=True))
            for _, times in candidates
        ]
        choice = candidates[scores.index(min(scores))][0]
        is_last = idx == len(rows) - 1
        up_to = 1 << 62 if is_last else int((PAIR_SIZES[idx] * PAIR_SIZES[idx + 1]) ** 0.5)
        if rules and rules[-1].choice == choice:
            rules.pop()
        rules.append(Rule(up_to, choice))
    return tuple(rules)


def markdown(report: CollectivesReport, command: str) -> str:
    return "\n".join(_lines(report, command)) + "\n"


def _lines(report: CollectivesReport, command: str) -> Iterator[str]:
    yield f"# Group-free collectives, {report.facts['date']}\n"
    if report.cells:
        yield from _collective_lines(report, command)
    else:
        yield f"{report.facts['device']}, which do not all reach each other; command: `{command}`\n"
    yield "\n## Links: two GPUs send to each other at once, peer memory and main memory\n"
    yield table_head("GPUs | transport | bytes each way | us | GB/s")
    for row in report.links:
        rate, pair = row["bytes"] / row["us"] / 1e3, " and ".join(map(str, row["pair"]))
        yield table_row(pair, row["transport"], size_name(row["bytes"]), f"{row['us']:.1f}", f"{rate:.1f}")


def _collective_lines(report: CollectivesReport, command: str) -> Iterator[str]:
    facts = report.facts
    yield (
        f"{facts['device']}, driver for CUDA {facts['driver_cuda']}, PyTorch {facts['torch']}, NCCL "
        f"{facts['nccl']} (NCCL_NVLS_ENABLE={facts['nccl_nvls']}); command: `{command}`\n"
    )
    yield (
        "Microseconds per call, medians, the slowest rank; one run. Bytes are each rank's whole input. "
        "graph: 20 calls (5 from 16 MB on) in one CUDA graph. arena: the result stays where peers wrote "
        "it, which is what attention reads; fresh: copied out, as NCCL's result is. x: NCCL's time over "
        "ours, both in graphs. GB/s: what one rank sends to others, in the arena; % of the copy engine's "
        f"{facts['copy_engine_gb_per_s']:.0f} GB/s to one peer.\n"
    )
    for pattern in measure.PATTERNS:
        for degree in sorted({row["degree"] for row in report.cells}):
            yield f"## {pattern.replace('_', '-')}, {counted(degree, 'GPU')}\n"
            yield table_head(
                "bytes | NCCL eager | NCCL graph | eager, fresh | graph, fresh | eager, arena | graph, arena",
                "x fresh | x arena | GB/s | % copy engine | host us | NCCL host us | same bytes",
            )
            for row in report.cells:
                if (row["pattern"], row["degree"]) == (pattern, degree):
                    yield _cell_line(row, facts["copy_engine_gb_per_s"])
            yield ""
    yield "## Attention's exchange, there and back (q, k, v in one launch, bf16, 24 heads of 128)\n"
    yield "NCCL: four all-to-alls with the contiguous permutes that diffusers issues.\n"
    names = ("nccl_eager", "nccl_graph", "ours_eager", "ours_graph", "ours_there_graph")
    yield table_head(
        "model | tokens | GPUs | NCCL eager | NCCL graph | ours eager | ours graph | there only",
        "x | same bytes",
    )
    for row in report.fused:
        times = [f"{row[name]:.1f}" for name in names]
        gain = f"{row['nccl_graph'] / row['ours_graph']:.2f}"
        yield table_row(row["model"], row["tokens"], row["degree"], *times, gain, _same(row))
    yield "\n## A new group\n"
    yield table_head(
        "GPUs | ours, made, host us | with its entry barrier enqueued, host us | entered by all, us",
        "ours, MB | NCCL new_group ms | first collective ms | MB",
    )
    for row in report.groups:
        ours, nccl = row["ours"], row["nccl"]
        found = [f"{ours['made_us']:.1f}", f"{ours['host_us']:.1f}", f"{ours['entered_us']:.0f}"]
        found += [f"{ours['memory_mb']:.0f}", f"{nccl['new_group_ms']:.1f}"]
        found += [f"{nccl['first_collective_ms']:.0f}", f"{nccl['memory_mb']:.0f}"]
        yield table_row(row["degree"], *found)
    yield "\n## Barrier in a graph\n"
    for row in report.barriers:
        yield f"- {counted(row['degree'], 'GPU')}: {row['ours_graph']:.2f} us"


def _cell_line(row: MeasuredRow, copy_rate: float) -> str:
    degree, size = row["degree"], row["bytes"]
    sent = size * (degree - 1) / (degree if row["pattern"] == "all_to_all" else 1)
    rate = sent / (row["ours_arena_graph"] * 1e-6) / 1e9
    names = ("nccl_eager", "nccl_graph", "ours_eager", "ours_graph", "ours_arena_eager", "ours_arena_graph")
    found = [f"{row[name]:.1f}" for name in names]
    found += [f"{row['nccl_graph'] / row[name]:.2f}" for name in ("ours_graph", "ours_arena_graph")]
    found += [f"{rate:.0f}", f"{100 * rate / copy_rate:.0f}", f"{row['ours_host']:.1f}"]
    return table_row(size_name(size), *found, f"{row['nccl_host']:.1f}", _same(row))


def _same(row: MeasuredRow) -> str:
    return "yes" if row["is_equal"] else "NO"


def size_name(size: int) -> str:
    return f"{size // MIB} MB" if size >= MIB else f"{size // KIB} KB"
