"""csrc/gfc/cuda/context.h as ctypes, field by field."""

import ctypes
from ctypes import Structure, c_int32, c_int64, c_uint32, c_uint64

from gfgen.gfc.native import MAX_RANKS, NUM_KINDS, PlanStruct, TaskStruct

NUM_BANKS = 2
MAX_MOVES = 4
FLAGGED_BYTES = 1 << 20
AWAIT, COPY, PUBLISH = 1, 2, 4


class Peers(Structure):
    _fields_ = [
        ("size", c_int32),
        ("own", c_int32),
        ("kind", c_uint32),
        ("first_sequence", c_uint32),
        ("own_rank", c_int32),
        ("unused", c_int32),
        ("own_base", c_uint64),
        ("flagged", c_uint64),
        ("bank_offset", c_uint64 * NUM_BANKS),
        ("layout_slot", c_int32 * MAX_RANKS),
        ("rank", c_int32 * MAX_RANKS),
        ("base", c_uint64 * MAX_RANKS),
    ]


class Edges(Structure):
    _fields_ = [
        ("entries", c_uint64 * MAX_RANKS),
        ("sent", c_uint64 * MAX_RANKS),
        ("received", c_uint64 * MAX_RANKS),
        ("credit_tag", c_uint32 * NUM_BANKS * MAX_RANKS),
        ("broken", c_int32 * MAX_RANKS),
    ]


class Context(Structure):
    _fields_ = [
        ("plan", PlanStruct),
        ("rank", c_int32),
        ("unused", c_int32),
        ("base", c_uint64 * MAX_RANKS),
        ("aborted_through", c_uint64),
        ("record", c_uint64),
        ("incarnation", c_uint32 * MAX_RANKS),
        ("arrived", c_uint32 * MAX_RANKS),
        ("finished", c_uint32),
        ("poison_lock", c_uint32),
        ("sent_blocks", c_uint32 * MAX_RANKS),
        ("received_blocks", c_uint32 * MAX_RANKS),
        ("task", TaskStruct),
        ("peers", Peers * NUM_KINDS),
        ("edges", Edges),
    ]


class Move(Structure):
    _fields_ = [
        ("input", c_uint64),
        ("output", c_uint64),
        ("inner_bytes", c_int64),
        ("outer_stride", c_int64),
        ("first_stride", c_int64),
        ("middle_stride", c_int64),
        ("second_stride", c_int64),
        ("outer", c_int32),
        ("middle", c_int32),
        ("is_concat_first", c_int32),
        ("is_split", c_int32),
        ("is_rotated", c_int32),
        ("unused", c_int32),
        ("split_sizes", c_int32 * MAX_RANKS),
        ("concat_sizes", c_int32 * MAX_RANKS),
        ("result_offset", c_uint64 * MAX_RANKS),
    ]


class Exchange(Structure):
    _fields_ = [
        ("context", c_uint64),
        ("kind", c_uint32),
        ("num_moves", c_int32),
        ("num_slices", c_uint32),
        ("num_keepers", c_uint32),
        ("unit_bytes", c_uint32),
        ("tile_bytes", c_uint32),
        ("dense_bytes", c_uint64),
        ("moves", Move * MAX_MOVES),
    ]


class Chunk(Structure):
    _fields_ = [
        ("context", c_uint64),
        ("address", c_uint64),
        ("bytes", c_uint64),
        ("dispatch", c_uint64),
        ("timeout_ns", c_uint64),
        ("chunk", c_uint64),
        ("peer", c_int32),
        ("label", c_uint32),
        ("steps", c_uint32),
        ("unused", c_uint32),
    ]


SIZES = tuple(ctypes.sizeof(structure) for structure in (Context, Move, Exchange, Chunk))
"""As `gfc_sizes` in the compiled kernels: other sizes mean other sources."""
