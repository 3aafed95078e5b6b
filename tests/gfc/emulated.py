"""The kernels of exchanges, and what launches them, on CPU processes.

The sources are compiled as C++ (native/emulated.h); instructions of the GPU's memory become atomics. Groups,
launches and structures are those of GPUs, so all but the GPU itself takes part.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from ctypes import c_uint32, c_uint64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gfgen.gfc import native
from gfgen.gfc.arena import ArenaPlan, map_memory
from gfgen.gfc.cuda import device_group
from gfgen.gfc.cuda.device_arena import ABORTED_THROUGH_OFFSET, FAILURE_OFFSET, arena_bytes
from gfgen.gfc.cuda.device_group import CudaGroup, DispatchState
from gfgen.gfc.cuda.kernels import AWAIT, COPY, PUBLISH, Chunk, Context
from gfgen.gfc.cuda.selector import MIN_FLAGGED_UNIT, KernelChoice
from gfgen.gfc.descriptor import Descriptor

ROOT = Path(__file__).resolve().parents[2]
THREADS = 32
_INSTRUCTIONS = {
    r"ld\.acquire\.sys": "value = __atomic_load_n((const uint64_t*)address, __ATOMIC_ACQUIRE), rest();",
    r"ld\.relaxed\.sys\.global\.u64": "value = __atomic_load_n((const uint64_t*)address, __ATOMIC_RELAXED);",
    r"st\.release\.sys": "__atomic_store_n((uint64_t*)address, value, __ATOMIC_RELEASE);",
    r"st\.relaxed\.sys\.global\.u64": "__atomic_store_n((uint64_t*)address, value, __ATOMIC_RELAXED);",
    r"atom\.add": "old = __atomic_fetch_add(address, value, __ATOMIC_ACQ_REL);",
    r"mov\.u64": "now = emulated_now_ns();",
    r"ld\.relaxed\.sys\.global\.v2": (
        "low = load_relaxed_sys(address), high = load_relaxed_sys(address + 8), rest();"
    ),
}
_PAIRS = {
    '"l"(0ull)': "store_relaxed_sys(address, 0), store_relaxed_sys(address + 8, 0);",
    "flag | data.x": "for (int i : {0, 8}) store_relaxed_sys(address + i, flag | (i ? data.y : data.x));",
}
"""Each word of a pair carries its flag, so they may arrive one after the other."""
_MAIN = """
extern "C" void run_enter(uint64_t context, const Descriptor* group, uint64_t timeout_ns) {
  launch(1, 32, [=] { gfc_enter(context, *group, timeout_ns); });
}
#define RUN(name) \\
  extern "C" void run_##name(const Exchange* exchange, unsigned grid, unsigned block) { \\
    launch(grid, block, [=] { gfc_##name(*exchange); }); \\
  }
RUN(staged) RUN(exchange) RUN(flagged) RUN(flagged_dense)
extern "C" void run_transfer(const Chunk* chunk, int is_sender) {
  launch(1, 32, [=] { is_sender != 0 ? gfc_send(*chunk) : gfc_recv(*chunk); });
}
"""


def build(folder: Path, *, fault: tuple[str, str] = ("", "")) -> Path:
    """The library with the kernels, in which a text may stand for another; skips without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    shutil.copytree(ROOT / "csrc" / "gfc", folder / "gfc", dirs_exist_ok=True)
    cuda = folder / "gfc" / "cuda"
    for name in ("memory.cuh", "copy.cuh", "kernels.cu"):
        text = (cuda / name).read_text().replace(*fault) if fault[0] else (cuda / name).read_text()
        text = re.sub(r'asm volatile\(\s*"([^"]*)(?:[^;]|;(?!\n))*;\n', _replaced, text)
        (cuda / name).write_text(text.replace("__CUDA_ARCH__ >= 900", "0"))
    (cuda / "main.cpp").write_text('#include "emulated.h"\n#include "kernels.cu"\n' + _MAIN)
    library = folder / "emulated.so"
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'tests/gfc/native'}"]
    done = subprocess.run(
        [compiler, *flags, str(cuda / "main.cpp"), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def _replaced(found: re.Match[str]) -> str:
    if re.match(r"st\.relaxed\.sys\.global\.v2", found[1]):
        return next(text for operand, text in _PAIRS.items() if operand in found[0]) + "\n"
    for pattern, text in _INSTRUCTIONS.items():
        if re.match(pattern, found[1]):
            return text + "\n"
    return ";\n"  # of bulk copies, which are left out


class Launched:
    """In place of `Launch`."""

    def __init__(
        self, cuda: Any, function: Any, exchange: Any, *, grid: int, block: int, shared_bytes: int = 0
    ) -> None:
        self.buffer, self._function, self._size = exchange, function, (grid, block)

    def run(self, stream: int) -> None:
        self._function(ctypes.byref(self.buffer), *self._size)


class EmulatedEndpoint:
    """What groups use of a `CudaEndpoint`: over arenas in host memory, but among ranks that are `near`."""

    def __init__(
        self,
        library: Path,
        plan: ArenaPlan,
        *,
        rank: int,
        fds: Mapping[int, int],
        slice_bytes: int,
        near: Collection[int] = (),
        near_fds: Mapping[int, int] | None = None,
    ) -> None:
        loaded = ctypes.CDLL(str(library))
        loaded.run_enter.argtypes = (c_uint64, ctypes.c_void_p, c_uint64)
        self.plan, self.rank, self.torch_device = plan, rank, torch.device("cpu")
        self.host_choice = KernelChoice("staged", 4, slice_bytes)
        self.driver, self.selector, self.beside_blocks = None, SimpleNamespace(choose=_choose), None
        self.kernels: Any = _Kernels(loaded=loaded)
        self.prepared: dict[object, object] = {}
        self.group_slots: dict[object, Any] = {}
        self._near = {rank, *near}
        addresses = {each: map_memory(fd, arena_bytes(plan)) for each, fd in fds.items()}
        near_fds = {each: fd for each, fd in (near_fds or {}).items() if each in self._near}
        of_near = {each: map_memory(fd, arena_bytes(plan)) for each, fd in near_fds.items()}
        self.own = addresses[rank]
        self._results = of_near.get(rank, self.own)
        context = Context(plan=plan.as_native(), rank=rank)
        for each, address in {**addresses, **of_near}.items():
            context.base[each], context.incarnation[each] = address, 1
            context.inbox[each] = of_near[rank] if each in of_near else self.own
        context.aborted_through = self.own + ABORTED_THROUGH_OFFSET
        context.record = self.own + FAILURE_OFFSET
        self._context, self._enter, self._transfer = context, loaded.run_enter, loaded.run_transfer
        self.context = ctypes.addressof(context)
        self.failed = c_uint32.from_address(self.own + FAILURE_OFFSET)

    def group(self, descriptor: Descriptor, timeout_s: float = 20.0) -> CudaGroup:
        return CudaGroup(self, descriptor, DispatchState(descriptor, int(timeout_s * 1e9)))

    def bind(self, descriptor: Descriptor, *, timeout_ns: int) -> None:
        encoded = native.DescriptorStruct.from_buffer_copy(descriptor.encode(self.rank))
        self._enter(self.context, ctypes.addressof(encoded), timeout_ns)

    def are_far(self, ranks: Sequence[int]) -> bool:
        return not self._near.issuperset(ranks)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(self._results + offset)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def move(self, x: torch.Tensor, peer: int, dispatch: int, *, is_sender: bool) -> None:
        """Send a tensor, or receive one into it, by chunks."""
        total, limit = x.numel() * x.element_size(), self.plan.post_bytes
        for at in range(0, total, limit):
            size, steps = min(limit, total - at), AWAIT | COPY | PUBLISH
            chunk = Chunk(
                self.context, x.data_ptr() + at, size, dispatch, 20 * 10**9, at // limit, peer, 0, steps
            )
            self._transfer(ctypes.byref(chunk), int(is_sender))
        assert not self._context.edges.broken[peer]

    def stream(self) -> int:
        return 0

    def check(self, dispatch: int) -> None:
        """The failure of this dispatch, if there is one."""
        from gfgen.gfc.arena import Failure

        failure = Failure.from_record(self._context.task.failure)
        if failure.status != native.OK and failure.dispatch == dispatch:
            raise failure.as_error()


class _Kernels(SimpleNamespace):
    num_multiprocessors = 16

    def __getitem__(self, name: str) -> Any:
        function = self.loaded[f"run_{name}"]
        function.argtypes = (ctypes.c_void_p, c_uint32, c_uint32)
        return function


def _choose(*, pair_bytes: int, dense_unit_bytes: int, **_: object) -> KernelChoice:
    """Blocks run in turn, so none may wait for a later one."""
    is_flagged = dense_unit_bytes >= MIN_FLAGGED_UNIT and pair_bytes <= 2048
    return KernelChoice("flagged", 4) if is_flagged else KernelChoice("threads", 2, in_turn=True)


def use_emulated_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_group, "Launch", Launched)
    monkeypatch.setattr(device_group, "_THREADS", THREADS)
