"""Faults in the collectives that tests have to find: kernels from changed sources, switched by a number.

The sources of gfgen stay as they are. A copy of them gets a variable on the device and a condition at each
place where a fault is planted, so that all faults are compiled at once.
"""

from __future__ import annotations

import shutil
from ctypes import byref, c_size_t, c_uint64
from pathlib import Path

from gfgen.gfc.cuda import compiler, device_group
from gfgen.gfc.cuda.device_endpoint import CudaEndpoint
from gfgen.gfc.cuda.device_group import Bank
from gfgen.gfc.cuda.kernels import Kernels, Launch

NOTHING, NO_BARRIER, ONE_BANK, COPY_AT_ONCE, RECEIVE_AT_ONCE, EDGE_KEPT = range(6)
CHANGES = (
    ('#include "copy.cuh"\n', '#include "copy.cuh"\nextern "C" { __device__ int gfc_fault = 0; }\n'),
    (
        "if (await_entry(mem, wait, failure) != kOk)",
        f"if (gfc_fault != {NO_BARRIER} && await_entry(mem, wait, failure) != kOk)",
    ),
    (
        "peers.bank_offset[number() % kNumBanks]",
        f"peers.bank_offset[gfc_fault == {ONE_BANK} ? 0 : number() % kNumBanks]",
    ),
    (
        "const uint64_t idx = present.peers.own_rank * kNumBanks + present.count(slot) % kNumBanks;",
        "const uint64_t idx = present.peers.own_rank * kNumBanks\n"
        f"    + (gfc_fault == {ONE_BANK} ? 0 : present.count(slot) % kNumBanks);",
    ),
    (
        "const uint64_t idx = present.peers.rank[slot] * kNumBanks + present.count(slot) % kNumBanks;",
        "const uint64_t idx = present.peers.rank[slot] * kNumBanks\n"
        f"    + (gfc_fault == {ONE_BANK} ? 0 : present.count(slot) % kNumBanks);",
    ),
    (
        "boxes.has_arrived = await_peer(context, present, source);",
        f"boxes.has_arrived = gfc_fault == {COPY_AT_ONCE} || await_peer(context, present, source);",
    ),
    (
        "if (!await_transfer(context, chunk, kPostLine + bank, post)) return;",
        f"if (gfc_fault != {RECEIVE_AT_ONCE}"
        " && !await_transfer(context, chunk, kPostLine + bank, post)) return;",
    ),
    (
        "restart_edge(mem, context.edges, peer);",
        f"if (gfc_fault != {EDGE_KEPT}) restart_edge(mem, context.edges, peer);",
    ),
)


def write_sources(folder: Path) -> Path:
    """The sources with all faults in them, none of them active; returns where they are."""
    sources = folder / "gfc"
    shutil.copytree(compiler.source_dir(), sources)
    kernels = sources / "cuda" / "kernels.cu"
    text = kernels.read_text()
    for before, after in CHANGES:
        assert text.count(before) == 1, f"kernels.cu has {text.count(before)} times: {before}"
        text = text.replace(before, after)
    kernels.chmod(0o644)
    kernels.write_text(text)
    return sources


def plant(endpoint: CudaEndpoint, sources: Path, fault: int) -> None:
    """As a rank's first program: from here on its kernels have this fault."""
    compiler.source_dir = lambda: sources
    kernels = Kernels(endpoint.device)
    address, size = c_uint64(), c_size_t()
    kernels.driver.call("cuModuleGetGlobal_v2", byref(address), byref(size), kernels._module, b"gfc_fault")
    kernels.driver.write(address.value, fault.to_bytes(4, "little"))
    endpoint.kernels = kernels
    descriptor, bound_ns = endpoint._native_descriptor, endpoint._bound_ns
    endpoint._enter = Launch(
        kernels.driver, kernels["enter"], c_uint64(endpoint.context), descriptor, bound_ns, grid=1, block=32
    )
    if fault == ONE_BANK:  # the host says where results lie in the arena
        bank_of = device_group.bank_of
        device_group.bank_of = lambda *key: Bank(bank_of(*key).offsets[:1] * 2, bank_of(*key).num_bytes)
