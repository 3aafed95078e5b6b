// What host and kernels share on CUDA: a rank's context in its device memory, and the parameters
// of launches. Plain structs; gfgen/gfc/cuda/kernels.py mirrors them field by field.
//
// A context belongs to one rank of one process. Kernels of a task, one after the other, read and
// write `task`, `peers` and `arrived`: those of the task stream, and exchanges beside computation on
// another stream, which events order after all earlier exchanges and before all later ones. Kernels of
// the transfer streams use the rest. So a captured graph holds no group: it finds the group in the
// context, where `gfc_enter` has put it.
#pragma once

#include "../protocol.h"

namespace gfc {

// For messages that carry their flags with the data: inboxes behind the plan's arena, one per
// source rank and bank (bank: parity of the edge's count). Nothing else ever writes there.
constexpr uint64_t kFlaggedBytes = 1 << 20;  // 512 KiB of data in 8-byte words {flag, data}
GFC_FN uint64_t flagged_offset(const Plan& plan, int source_rank, uint64_t count) {
  return arena_bytes(plan) + (source_rank * kNumBanks + count % kNumBanks) * kFlaggedBytes;
}
GFC_FN uint64_t cuda_arena_bytes(const Plan& plan) {
  return arena_bytes(plan) + kMaxRanks * kNumBanks * kFlaggedBytes;
}

// One kind of group of the present task, worked out once by `gfc_enter` so that a collective finds
// all it needs with loads that do not depend on each other. Arrays are by slot in that group.
struct Peers {
  int32_t size, own;
  uint32_t kind;  // canonical
  uint32_t first_sequence;
  int32_t own_rank, unused;
  uint64_t flagged;  // offset of the inboxes of messages with flags
  uint64_t bank_offset[kNumBanks];
  int32_t layout_slot[kMaxRanks], rank[kMaxRanks];
  uint64_t base[kMaxRanks], inbox[kMaxRanks];  // as in Context
};

struct Context {
  Plan plan;
  int32_t rank;
  uint32_t link_mb_per_s;         // exchanges over host memory are no faster than this; 0: no limit
  uint64_t base[kMaxRanks];       // arenas that this rank writes to, as mapped here
  uint64_t inbox[kMaxRanks];      // this rank's own arena that each rank writes to
  uint64_t aborted_through;       // address of the host's word
  uint64_t record;                // address of the host's copy of the last failure
  uint32_t incarnation[kMaxRanks];
  uint32_t arrived[kMaxRanks];    // by slot: blocks that have pushed to that rank
  uint32_t finished;              // blocks that are done with an exchange
  uint32_t poison_lock;           // whoever raises it writes the task's failure
  uint32_t sent_blocks[kMaxRanks], received_blocks[kMaxRanks];
  Task task;
  Peers peers[kNumKinds];
  Edges edges;
};

// One tensor of an exchange, as [outer, first, middle, second, inner] with a dense inner part.
// One of `first` and `second` is concatenated and the other one split; sizes are by slot.
struct Move {
  uint64_t input;
  uint64_t output;  // 0: the result stays in the arena
  int64_t inner_bytes;
  int64_t outer_stride, first_stride, middle_stride, second_stride;  // of the input, in bytes
  int32_t outer, middle;
  int32_t is_concat_first;
  int32_t is_split;  // 0: each rank gets the whole input
  int32_t is_rotated;  // the concatenation begins with the receiver's own part, and goes on in turn
  int32_t unused;
  int32_t split_sizes[kMaxRanks];
  int32_t concat_sizes[kMaxRanks];
  uint64_t result_offset[kMaxRanks];  // in the bank of each slot's rank
};

constexpr int kMaxMoves = 4;

struct Exchange {
  uint64_t context;
  uint32_t kind;
  int32_t num_moves;
  uint32_t num_slices;   // blocks (with flags: warps) that share one message of one tensor
  uint32_t num_keepers;  // blocks that copy what stays on this rank
  uint32_t unit_bytes;   // 16, 8, 4, 2 or 1: divides every address and length
  uint32_t tile_bytes;   // of bulk copies
  uint64_t dense_bytes;  // gfc_flagged_dense: the length of every message
  Move moves[kMaxMoves];
};

enum TransferStep : uint32_t { kAwait = 1, kCopy = 2, kPublish = 4 };

// One chunk of a point-to-point transfer.
struct Chunk {
  uint64_t context;
  uint64_t address, bytes;  // of the tensor
  uint64_t dispatch, timeout_ns;
  uint64_t chunk;
  int32_t peer;
  uint32_t label;
  uint32_t steps;  // TransferStep
  uint32_t link_mb_per_s;  // as in Context
};

}  // namespace gfc
