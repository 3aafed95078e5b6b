"""The C interface of csrc/gfc as ctypes; structures mirror the headers field by field.

ctypes releases the interpreter lock during each call, so a control thread can set the abort word
while the task thread waits for a peer.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from functools import cache
from pathlib import Path

from gfgen.errors import RunError

MAX_RANKS = 8
MAX_DIMS = 8
NUM_KINDS = 6

OK, TIMED_OUT, ABORTED, PROTOCOL, STALE_MAP, NOT_ENTERED, NOT_RISING, BROKEN_EDGE = range(8)
WHOLE, HALF, ULYSSES, RING, PAIR, TORUS = range(NUM_KINDS)


def each(kind: type, *names: str) -> list[tuple[str, type]]:
    """Fields of one type, one behind the other."""
    return [(name, kind) for name in names]


class PlanStruct(Structure):
    """csrc/gfc/plan.h"""

    _fields_ = [
        *each(c_uint64, "data_bytes", "post_bytes"),
        *each(c_uint32, "first_sequence", "unused"),
    ]


class DescriptorStruct(Structure):
    """csrc/gfc/descriptor.h"""

    _fields_ = [
        ("dispatch", c_uint64),
        ("incarnation", c_uint32 * MAX_RANKS),
        ("rank", c_uint8 * MAX_RANKS),
        *each(c_uint8, "num_ranks", "slot", "cfg", "ulysses", "ring", "torus"),
        ("unused", c_uint8 * 2),
    ]


class RecordStruct(Structure):
    """csrc/gfc/protocol.h"""

    _fields_ = [
        *each(c_int32, "status", "rank", "peer"),
        ("line", c_uint32),
        *each(c_uint64, "dispatch", "expected", "seen"),
    ]


class TaskStruct(Structure):
    """csrc/gfc/protocol.h"""

    _fields_ = [
        ("group", DescriptorStruct),
        *each(c_uint64, "seed", "timeout_ns"),
        ("exchanges", c_uint64 * MAX_RANKS),
        ("instances", c_uint64 * NUM_KINDS),
        ("has_entered", c_uint64),
        ("failure", RecordStruct),
    ]


class PartStruct(Structure):
    """csrc/gfc/reshard.h"""

    _fields_ = [
        *each(c_uint64, "input", "output"),
        *each(c_int32, "item_bytes", "num_dims", "split_dim", "concat_dim"),
        *each(c_int64 * MAX_DIMS, "shape", "input_stride", "output_stride"),
        *each(c_int64 * MAX_RANKS, "split_sizes", "concat_sizes"),
    ]


class BlockStruct(Structure):
    """csrc/gfc/strided.h"""

    _fields_ = [
        ("base", c_uint64),
        ("num_dims", c_int),
        ("item_bytes", c_int64),
        *each(c_int64 * MAX_DIMS, "extent", "stride"),
    ]


# Name -> result, arguments. Addresses are plain integers: they come from mmap and data_ptr().
_ADDRESS = c_uint64
_PLAN, _RECORD, _TASK, _BLOCK = map(POINTER, (PlanStruct, RecordStruct, TaskStruct, BlockStruct))
_STRUCTURES = (PlanStruct, DescriptorStruct, RecordStruct, TaskStruct, PartStruct, BlockStruct)
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "gfc_struct_bytes": (None, (POINTER(c_uint64),)),
    "gfc_arena_bytes": (c_uint64, (_PLAN,)),
    "gfc_plan_hash": (c_uint64, (_PLAN,)),
    "gfc_arena_map": (_ADDRESS, (c_int, c_uint64)),
    "gfc_arena_unmap": (None, (_ADDRESS, c_uint64)),
    "gfc_arena_format": (None, (_ADDRESS, _PLAN, c_int, c_uint32)),
    "gfc_arena_check": (c_int, (_ADDRESS, _PLAN, c_int, c_uint32)),
    "gfc_arena_abort_through": (None, (_ADDRESS, c_uint64)),
    "gfc_arena_last_failure": (None, (_ADDRESS, _RECORD)),
    "gfc_context_create": (_ADDRESS, (_PLAN, c_int)),
    "gfc_context_destroy": (None, (_ADDRESS,)),
    "gfc_context_map": (None, (_ADDRESS, c_int, c_uint32, _ADDRESS)),
    "gfc_context_restart_edge": (None, (_ADDRESS, c_int)),
    "gfc_task_begin": (None, (_TASK, c_char_p, c_uint64)),
    "gfc_enter": (c_int, (_ADDRESS, _TASK)),
    "gfc_exchange": (c_int, (_ADDRESS, _TASK, c_uint32, c_char_p, c_int)),
    "gfc_send": (c_int, (_ADDRESS, c_int, c_uint64, c_uint32, _BLOCK, c_uint64, _RECORD)),
    "gfc_recv": (c_int, (_ADDRESS, c_int, c_uint64, c_uint32, _BLOCK, c_uint64, _RECORD)),
}


@cache
def library() -> ctypes.CDLL:
    """The native library, loaded once; raises RunError when it was not built."""
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        raise RunError(
            f"{path} is missing: install gfgen, or in a checkout run `python setup.py build_ext --inplace`"
        )
    loaded = ctypes.CDLL(str(path), use_errno=True)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name, None)
        if function is None:
            raise RunError(f"{path.name} was built from other sources: build it again")
        function.restype = result
        function.argtypes = arguments
    found = (c_uint64 * len(_STRUCTURES))()
    loaded.gfc_struct_bytes(found)
    if list(found) != [ctypes.sizeof(structure) for structure in _STRUCTURES]:
        raise RunError(f"{path.name} was built from other sources: build it again")
    return loaded
