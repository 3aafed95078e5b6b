"""What of the CUDA collectives needs no GPU: index arithmetic, mirrored structures, compiling."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import shutil
import subprocess
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import gfc_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gfgen.errors import LayoutError
from gfgen.gfc import native
from gfgen.gfc.arena import ArenaPlan
from gfgen.gfc.cuda import compiler, kernels
from gfgen.gfc.cuda.captured import SharedPool
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import Bank, CudaGroup, Prepared, ResultSpec, bank_of, canonical
from gfgen.gfc.cuda.moves import TensorMove, move_of, offsets_of
from gfgen.gfc.cuda.selector import (
    KernelChoice,
    Rule,
    Selector,
    host_choice,
    load_selector,
    store_rules,
    tuned_tables,
)
from gfgen.gfc.descriptor import Descriptor
from gfgen.gfc.reshard import Resharding, shard_sizes
from gfgen.layout import Degrees, Layout

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "gfc" / "cuda" / "kernels.cu"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("boxes") / "boxes.so"
    compiler_path = shutil.which("g++") or shutil.which("clang++")
    if compiler_path is None:
        pytest.skip("no C++ compiler")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    source = ROOT / "tests" / "gfc" / "native" / "boxes.cpp"
    command = [compiler_path, *flags, f"-I{ROOT / 'csrc' / 'gfc'}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(target))


class LooseGroup(CudaGroup):
    """With a dictionary, for what a test puts in the place of methods."""


def test_structures_are_mirrored(boxes: ctypes.CDLL) -> None:
    found = (ctypes.c_uint32 * len(kernels.SIZES))()
    boxes.sizes(found)
    assert tuple(found) == kernels.SIZES


def exchange(
    boxes: ctypes.CDLL,
    inputs: list[list[torch.Tensor]],
    *,
    split_dim: int,
    concat_dim: int,
    split: tuple[int, ...],
    concat: tuple[int, ...],
    is_rotated: bool = False,
) -> list[list[torch.Tensor]]:
    """By slot, then tensor: the results that the kernels' arithmetic gives."""
    size = len(inputs)
    parts = shapes_of(inputs, split_dim, concat_dim, split, concat, is_rotated)
    offsets, num_bytes = offsets_of(parts[0])
    banks = [torch.full((num_bytes,), 0xEE, dtype=torch.uint8) for _ in range(size)]
    staging = torch.empty(num_bytes, dtype=torch.uint8)
    outputs = [torch.full_like(bank, 0xDD) for bank in banks]
    for source in range(size):
        for x, part, offset in zip(inputs[source], parts[source], offsets, strict=True):
            move = part.placed(offset)
            for target in range(size):
                pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(banks[target].data_ptr())
                boxes.move_box(ctypes.byref(move), size, source, target, *pointers)
                packed = ctypes.c_void_p(staging.data_ptr()), ctypes.c_void_p(outputs[target].data_ptr())
                boxes.move_box_packed(ctypes.byref(move), size, source, target, pointers[0], *packed)
    for slot in range(size):
        for part, offset in zip(parts[slot], offsets, strict=True):
            span = slice(offset[slot], offset[slot] + part.result_bytes[slot])
            assert torch.equal(banks[slot][span], outputs[slot][span])
    return [
        [
            banks[slot][offset[slot] : offset[slot] + part.result_bytes[slot]]
            .view(x.dtype)
            .view(part.result_shape)
            for x, part, offset in zip(inputs[slot], parts[slot], offsets, strict=True)
        ]
        for slot in range(size)
    ]


def shapes_of(
    inputs: list[list[torch.Tensor]],
    split_dim: int,
    concat_dim: int,
    split: tuple[int, ...],
    concat: tuple[int, ...],
    is_rotated: bool,
) -> list[list[TensorMove]]:
    """Of each slot's tensors."""
    parts = []
    for slot, tensors in enumerate(inputs):
        found = [
            move_of(
                tuple(x.shape),
                x.stride(),
                x.element_size(),
                slot=slot,
                resharding=Resharding(split_dim, concat_dim, split, concat, is_rotated),
            )
            for x in tensors
        ]
        assert all(found)
        parts.append([part for part in found if part is not None])
    return parts


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.int16) -> torch.Tensor:
    return torch.randint(-30000, 30000, shape, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 8),
    tokens=st.integers(0, 40),
    heads=st.integers(2, 24),
    head_dim=st.sampled_from([1, 8, 16]),
    is_transposed=st.booleans(),
    num_batches=st.integers(1, 2),
)
def test_attention_exchanges_there_and_back(
    boxes: ctypes.CDLL,
    size: int,
    tokens: int,
    heads: int,
    head_dim: int,
    is_transposed: bool,
    num_batches: int,
) -> None:
    token_sizes, head_sizes = shard_sizes(tokens, size), shard_sizes(max(heads, size), size)
    num_heads = sum(head_sizes)
    inputs = []
    for length in token_sizes:
        tensors = [random((num_batches, length, num_heads, head_dim)) for _ in range(3)]
        if is_transposed and length:  # as [B, H, L, D] in memory
            tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
        inputs.append(tensors)
    got = exchange(boxes, inputs, split_dim=2, concat_dim=1, split=head_sizes, concat=token_sizes)
    for idx in range(3):
        expected = oracle.heads_from_tokens([tensors[idx] for tensors in inputs], head_sizes=head_sizes)
        for slot in range(size):
            assert torch.equal(got[slot][idx], expected[slot])
    back = exchange(
        boxes, [[x[0]] for x in got], split_dim=1, concat_dim=2, split=token_sizes, concat=head_sizes
    )
    for slot in range(size):
        assert torch.equal(back[slot][0], inputs[slot][0])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dim=st.integers(0, 4),
    size=st.integers(2, 5),
    data=st.data(),
)
def test_all_gather_of_uneven_shards(
    boxes: ctypes.CDLL, shape: list[int], dim: int, size: int, data: st.DataObject
) -> None:
    dim %= len(shape)
    sizes = tuple(data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)))
    inputs = [random((*shape[:dim], length, *shape[dim + 1 :])) for length in sizes]
    got = exchange(boxes, [[x] for x in inputs], split_dim=-1, concat_dim=dim, split=(), concat=sizes)
    for slot, expected in enumerate(oracle.all_gather(inputs, dim=dim)):
        assert torch.equal(got[slot][0], expected)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=8),
    heads=st.integers(1, 6),
    first=st.integers(0, 3),
    num_batches=st.integers(1, 2),
)
def test_gathered_tokens_begin_with_the_own_ones(
    boxes: ctypes.CDLL, sizes: list[int], heads: int, first: int, num_batches: int
) -> None:
    inputs = []
    for length in sizes:
        wide = [random((num_batches, length, first + heads, 8)) for _ in range(2)]
        inputs.append([x[:, :, first:] for x in wide])
    got = exchange(boxes, inputs, split_dim=-1, concat_dim=1, split=(), concat=tuple(sizes), is_rotated=True)
    for idx in range(2):
        for slot, expected in enumerate(oracle.gather_tokens([tensors[idx] for tensors in inputs])):
            assert torch.equal(got[slot][idx], expected)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=3, max_size=5),
    dims=st.permutations(range(3)),
    size=st.integers(2, 4),
)
def test_all_to_all_of_any_two_dimensions(
    boxes: ctypes.CDLL, shape: list[int], dims: list[int], size: int
) -> None:
    split_dim, concat_dim = dims[0], dims[1]
    shape[split_dim] += size
    split = shard_sizes(shape[split_dim], size)
    concat = tuple(range(1, size + 1))
    inputs = []
    for length in concat:
        mine = list(shape)
        mine[concat_dim] = length
        inputs.append(random(tuple(mine), torch.int64))
    got = exchange(
        boxes, [[x] for x in inputs], split_dim=split_dim, concat_dim=concat_dim, split=split, concat=concat
    )
    expected = oracle.all_to_all(inputs, split_dim=split_dim, concat_dim=concat_dim, split_sizes=split)
    for slot in range(size):
        assert torch.equal(got[slot][0], expected[slot])


def test_units_are_as_wide_as_lengths_allow() -> None:
    def unit(length: int, item_bytes: int) -> int:
        part = move_of(
            (length,), (1,), item_bytes, slot=0, resharding=Resharding(-1, 0, (), (length, length))
        )
        assert part is not None
        return part.unit_bytes

    assert [unit(64, 2), unit(4, 2), unit(5, 2), unit(3, 4), unit(3, 1)] == [16, 8, 2, 4, 1]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=2, max_size=4),
    shape=st.lists(st.integers(1, 4), min_size=3, max_size=4),
    dims=st.permutations(range(3)),
    is_split=st.booleans(),
    item_bytes=st.sampled_from([1, 2, 4]),
)
def test_members_with_dense_tensors_find_the_same_unit(
    sizes: list[int], shape: list[int], dims: list[int], is_split: bool, item_bytes: int
) -> None:
    """It decides whether their messages carry flags: members that differ would wait for ever."""
    size, concat_dim, split_dim = len(sizes), dims[0], dims[1] if is_split else -1
    if is_split:
        shape[split_dim] += size
    split = shard_sizes(shape[split_dim], size) if is_split else ()
    units = set()
    for slot, length in enumerate(sizes):
        mine = [length if dim == concat_dim else extent for dim, extent in enumerate(shape)]
        part = move_of(
            tuple(mine),
            torch.empty(mine, device="meta").stride(),
            item_bytes,
            slot=slot,
            resharding=Resharding(split_dim, concat_dim, split, tuple(sizes)),
        )
        assert part is not None
        assert part.unit_bytes == part.dense_unit_bytes
        units.add(part.unit_bytes)
    assert len(units) == 1


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_what_lies_at_odd_addresses_is_copied_before_it_is_sent_with_flags(offset: int) -> None:
    """One rank may give such a tensor, and the others cannot know: their messages carry flags, too."""
    asked: list[dict[str, object]] = []

    def choose(**sizes: object) -> KernelChoice:
        asked.append(sizes)
        return KernelChoice("flagged", 4)

    group: Any = LooseGroup.__new__(LooseGroup)
    group.size, group.slot, group.bank = 2, 0, Bank((0, 0), 1 << 20)
    group._endpoint = SimpleNamespace(selector=SimpleNamespace(choose=choose))
    group.is_far = False
    group._prepare_launch = lambda *_, **__: "a launch"
    x = torch.zeros(68, dtype=torch.int16)[offset : offset + 64]
    assert x.storage_offset() == offset
    resharding = Resharding(-1, 0, (), (64, 0))
    assert group._prepare((x,), resharding, in_arena=False) == ("strides" if offset else "a launch")
    group.slot = 1
    assert group._prepare((x[:0],), resharding, in_arena=False) == "a launch"
    assert asked[0]["dense_unit_bytes"] == asked[1]["dense_unit_bytes"] == 16


@pytest.mark.parametrize("counts", [(0, 0, 0, 0, 0), (61, 0, 0, 0, 0), (0, 3, 2, 0, 1), (2, 4, 6, 8, 10)])
def test_a_barrier_of_each_kind_whose_second_bank_is_next_aligns_them(
    counts: tuple[int, ...],
) -> None:
    def of_kind(kind: int) -> SimpleNamespace:
        def barrier() -> None:
            run.counts[kind] += 1

        return SimpleNamespace(barrier=barrier)

    group: Any = LooseGroup.__new__(LooseGroup)
    run = group._run = SimpleNamespace(counts=list(counts))
    group.of_kind = of_kind
    group.align_banks()
    assert run.counts == [count + count % 2 for count in counts]


def test_who_gets_nothing_still_sends_as_to_a_result_outside_the_arena() -> None:
    """An empty tensor has no address; 0 says that results stay in the arena, where they lie otherwise."""

    group: Any = LooseGroup.__new__(LooseGroup)
    group._kind, group.bank, group._run = 0, Bank((0, 0), 1 << 20), SimpleNamespace(counts=[0])
    group._endpoint = SimpleNamespace(torch_device="cpu", stream=lambda: 0)
    buffer = bytearray(16)
    launch: Any = SimpleNamespace(buffer=buffer, run=lambda stream: None)
    prepared = Prepared(launch, (ResultSpec((1, 0, 4), (0, 4, 1), torch.int16, 0),), (0,))
    (result,) = group._launch(prepared, [48], in_arena=False)
    assert result.data_ptr() == 0
    assert int.from_bytes(buffer[:8], "little") == 48
    assert int.from_bytes(buffer[8:], "little") != 0


@settings(max_examples=80, deadline=None)
@given(
    splits=st.lists(st.integers(0, 60), min_size=2, max_size=5).filter(any),
    concats=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    bank_bytes=st.integers(200, 4000),
)
def test_all_ranks_take_as_many_rounds(splits: list[int], concats: list[int], bank_bytes: int) -> None:
    rounds: list[int] = []

    def move(tensors: Any, resharding: Resharding, *, in_arena: bool) -> tuple[torch.Tensor]:
        rounds[-1] += 1
        return (torch.zeros(sum(resharding.concat_sizes), resharding.split_sizes[group.slot], 8),)

    size = len(splits)
    for slot in range(size):
        group: Any = LooseGroup.__new__(LooseGroup)
        group.slot, group.size, group.bank = slot, size, Bank((0, 0), bank_bytes)
        group._endpoint = SimpleNamespace(device=0)
        group._move, group._empty = move, lambda shape, dtype: torch.empty(shape, dtype=dtype)
        rounds.append(0)
        resharding = Resharding(1, 0, tuple(splits), tuple(concats[:size]))
        try:
            group._in_rounds(torch.zeros(concats[slot], sum(splits), 8), resharding)
        except LayoutError:
            rounds[-1] = -1
    assert len(set(rounds)) == 1


def test_strides_that_no_kernel_takes_are_reported() -> None:
    x = random((2, 3, 4, 8)).transpose(2, 3)  # the innermost dimension is not dense
    found = move_of(tuple(x.shape), x.stride(), 2, slot=0, resharding=Resharding(2, 1, (4, 4), (3, 3)))
    assert found is None


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(LayoutError, match="slot 1 gives 3"):
        move_of((3, 4), (4, 1), 2, slot=1, resharding=Resharding(1, 0, (2, 2), (3, 2)))


@pytest.mark.parametrize(
    "degrees",
    [
        *[(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 1, 3), (2, 1, 3)],
        *[(1, 1, 1, 2), (2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (1, 2, 2, 2), (2, 2, 1, 2), (1, 1, 1, 7)],
    ],
)
def test_banks_are_where_kernels_find_them(boxes: ctypes.CDLL, degrees: Degrees) -> None:
    plan = ArenaPlan(data_bytes=(1 << 20) + 4096 * 3, post_bytes=1 << 12)
    layout = Layout(tuple(range(prod(degrees))), *degrees)
    encoded = Descriptor(1, layout, (1,) * layout.degree).encode(0)
    group = native.DescriptorStruct.from_buffer_copy(encoded)
    for kind in range(native.NUM_KINDS):
        bank = bank_of(plan.data_bytes, plan.post_bytes, degrees, canonical(degrees, kind))
        if bank.num_bytes == 0:
            continue
        found = (ctypes.c_uint64 * 3)()
        boxes.bank(ctypes.byref(plan.as_native()), ctypes.byref(group), kind, found)
        assert (*bank.offsets, bank.num_bytes) == tuple(found)
        assert bank.offsets[1] + bank.num_bytes <= plan.arena_bytes


def test_selector_falls_back_where_a_kernel_cannot_serve() -> None:
    rules = (Rule(1 << 10, KernelChoice("flagged", 8)), Rule(1 << 62, KernelChoice("bulk", 64, 1 << 14)))
    selector = Selector({(2, True): rules}, has_bulk=True)

    def path(pair_bytes: int, unit_bytes: int = 16, row_bytes: int = 4096) -> str:
        choice = selector.choose(
            num_ranks=2,
            in_arena=True,
            pair_bytes=pair_bytes,
            unit_bytes=unit_bytes,
            dense_unit_bytes=unit_bytes,
            row_bytes=row_bytes,
        )
        return choice.path

    assert [path(512), path(512, 4), path(4096), path(4096, 8), path(4096, 16, 64)] == [
        "flagged",
        "threads",
        "bulk",
        "threads",
        "threads",
    ]


def test_exchanges_through_host_memory_leave_most_of_a_small_device_to_attention() -> None:
    assert [host_choice(number).blocks for number in (28, 82, 132)] == [8, 16, 24]


def test_after_a_fault_messages_with_flags_are_cleared_before_the_next_entry_with_their_rank() -> None:
    """What an aborted task has left there would be a protocol error in the next one."""
    plan = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 12)
    enqueued: list[tuple[object, ...]] = []
    endpoint: Any = CudaEndpoint.__new__(CudaEndpoint)
    endpoint.rank, endpoint.plan, endpoint.last_dispatch, endpoint._host = 1, plan, 0, None
    endpoint.incarnations, endpoint._mapped, endpoint._unclean = dict.fromkeys(range(3), 1), {}, set()
    endpoint._native_descriptor, endpoint._bound_ns = native.DescriptorStruct(), ctypes.c_uint64()
    endpoint.arenas = {1: SimpleNamespace(address=1 << 40)}
    endpoint.driver = SimpleNamespace(call=lambda *arguments: enqueued.append(arguments))
    endpoint._enter = SimpleNamespace(run=lambda stream: enqueued.append(("enter", stream)))
    endpoint.stream = lambda: 77
    num_bytes = kernels.NUM_BANKS * kernels.FLAGGED_BYTES

    def enter(dispatch: int, *ranks: int) -> list[tuple[object, ...]]:
        enqueued.clear()
        descriptor = Descriptor(dispatch, Layout(ranks, ulysses=len(ranks)), (1,) * len(ranks))
        endpoint.bind(descriptor, timeout_ns=1000 * dispatch)
        return list(enqueued)

    def cleared(rank: int) -> tuple[object, ...]:
        return ("cuMemsetD8Async", (1 << 40) + plan.arena_bytes + rank * num_bytes, 0, num_bytes, 77)

    assert enter(1, 0, 1) == [("enter", 77)]
    endpoint.restart_edges([])  # no state was under way between them
    assert enter(2, 0, 1) == [cleared(0), ("enter", 77)]
    assert enter(3, 2, 1, 0) == [cleared(2), ("enter", 77)]
    assert enter(4, 2, 1, 0) == [("enter", 77)]
    assert endpoint._bound_ns.value == 4000, "what the launch passes on to the kernel"


@pytest.mark.parametrize(
    ("num_bytes", "steps"),
    [
        (1 << 12, [kernels.AWAIT | kernels.COPY | kernels.PUBLISH]),
        (4 << 20, [kernels.AWAIT, kernels.COPY | kernels.PUBLISH] * 4),
    ],
)
def test_state_is_sent_without_waiting_on_the_host(num_bytes: int, steps: list[int]) -> None:
    """Before a large chunk one block waits on the device: many would keep others from it."""
    endpoint: Any = CudaEndpoint.__new__(CudaEndpoint)
    endpoint.rank, endpoint.context, endpoint._host = 0, 1 << 30, None
    endpoint.plan = ArenaPlan(data_bytes=1 << 20, post_bytes=1 << 20)
    endpoint.arenas = {1: None}
    endpoint.driver = None  # which would have to be asked to wait
    found: list[int] = []
    endpoint._run_chunk = lambda name, chunk, what, stream: found.append(what)
    endpoint.send(torch.empty(num_bytes, dtype=torch.uint8), to=1, dispatch=7, stream=5)
    assert found == steps


def test_kernels_compile_with_nvcc(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    command = [nvcc, "-arch=sm_90", "-std=c++17", "-cubin", "-Werror", "all-warnings", "-Xcicc", "-O1"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "kernels.cubin"), str(KERNELS)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_kernels_compile_with_nvrtc_and_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler.find_nvrtc() is None:
        pytest.skip("NVRTC is not installed (it comes with CUDA builds of PyTorch)")
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    first = compiler.compiled("sm_90")
    (cached,) = compiler.kept()
    assert cached.parent == tmp_path / "kernels"
    cached.write_bytes(b"from the cache")
    assert first[:4] == b"\x7fELF"
    assert compiler.compiled("sm_90") == b"from the cache"


class ImitationGraph:
    """Of a pool that takes none where another one has failed, as torch's."""

    is_invalid = False
    spoiled: ClassVar[set[object]] = set()
    ended: ClassVar[list[object]] = []

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        assert pool not in self.spoiled
        assert capture_error_mode == "thread_local"
        self.pool = pool

    def capture_end(self) -> None:
        if self.is_invalid:
            self.spoiled.add(self.pool)
            raise RuntimeError("invalid capture")
        self.ended.append(self.pool)


@pytest.fixture
def imitation_graphs(monkeypatch: pytest.MonkeyPatch) -> type[ImitationGraph]:
    """In place of torch's."""
    pools = itertools.count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ImitationGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(pools)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device_index=3))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(ImitationGraph, "spoiled", set())
    monkeypatch.setattr(ImitationGraph, "ended", [])
    return ImitationGraph


def test_capture_that_has_become_invalid_is_ended_for_the_allocator_and_followed_by_one_that_is_not(
    imitation_graphs: type[ImitationGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *where, name=name: told.append((name, *where)), raising=False
        )
    pool, kept = SharedPool(torch.device("cpu")), imitation_graphs()
    with pool.capturing(kept):
        pass
    with pytest.raises(ValueError, match="first"), pool.capturing(imitation_graphs()):
        raise ValueError("first")
    assert told == []
    invalid = imitation_graphs()
    invalid.is_invalid = True
    imitation_graphs.ended.clear()
    with pytest.raises(ValueError, match="first"), pool.capturing(invalid):
        raise ValueError("first")
    assert told == [("_cuda_endAllocateToPool", 3, kept.pool), ("_cuda_releasePool", 3, kept.pool)]
    assert len(imitation_graphs.ended) == 1
    with pytest.raises(RuntimeError, match="invalid capture"), pool.capturing(invalid):
        pass
    with pool.capturing(later := imitation_graphs()):
        pass
    assert later.pool != kept.pool


def test_capture_that_torch_has_ended_by_itself_leaves_the_pool_as_it_is(
    imitation_graphs: type[ImitationGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory is too short to make a graph of what was captured."""

    def refuse(*_: object) -> None:
        raise RuntimeError("not currently recording")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse, raising=False)
    pool, kept, failing = SharedPool(torch.device("cpu")), imitation_graphs(), imitation_graphs()
    with pool.capturing(kept):
        pass
    failing.is_invalid = True
    with pytest.raises(RuntimeError, match="invalid capture"), pool.capturing(failing):
        pass
    imitation_graphs.spoiled.clear()
    with pool.capturing(later := imitation_graphs()):
        pass
    assert later.pool == kept.pool


def test_graphs_share_memory_as_long_as_there_is_one(imitation_graphs: type[ImitationGraph]) -> None:
    """torch does not take up a pool again whose graphs are gone."""
    pool = SharedPool(torch.device("cpu"))
    graphs = [imitation_graphs() for _ in range(3)]
    for graph in graphs:
        with pool.capturing(graph):
            pass
    (first,) = {graph.pool for graph in graphs}
    graphs.clear()
    del graph
    with pool.capturing(imitation_graphs()):
        pass
    assert imitation_graphs.ended[-1] != first


def test_ranks_choose_by_the_tables_that_were_there_when_they_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that is started again after `gfgen bench gfc --tune` must choose as the others do."""
    monkeypatch.setenv("GFGEN_CACHE", str(tmp_path))
    first, second = ({(2, False): (Rule(1 << 62, KernelChoice("threads", blocks)),)} for blocks in (3, 4))
    path = store_rules("NVIDIA H200", first)
    tables = tuned_tables()
    store_rules("NVIDIA H200", second)
    assert load_selector("NVIDIA H200", has_bulk=True, tables=tables).rules == first
    assert load_selector("NVIDIA H200", has_bulk=True).rules == second
    assert load_selector("NVIDIA A100", has_bulk=True).rules == {}
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    path.write_bytes(b"\xff")
    assert tuned_tables() == {}
    assert load_selector("NVIDIA H200", has_bulk=True, tables={path.name: "{"}).rules == {}
    assert caplog.text.count("using the shipped table") == 2
