// Where things lie in an arena. Every rank computes the same plan and compares its hash.
#pragma once

#include "descriptor.h"

namespace gfc {

constexpr uint64_t kLineBytes = 128;  // two 64-byte lines: the adjacent-line prefetcher pairs them
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kVersion = 1;  // counts changes of the layout below
constexpr int kNumBanks = 2;

// The signal lines that each source rank has in each receiver's arena; the source alone writes
// them, but for the restarts that `enter` and `restart_edge` argue. Consecutive signals of one
// purpose alternate between two lines, so that none is overwritten before it was waited for.
enum Line : uint32_t {
  kEntryLine = 0,     // "I have entered dispatch n": all that I did before is over
  kExchangeLine = 2,  // "my part of exchange n on this edge lies in your arena"
  kPostLine = 4,      // "chunk n of point-to-point lies in your arena"
  kCreditLine = 6,    // "I have read chunk n"
  kNumLines = 8,
};

struct Span {
  uint64_t offset, bytes;
};

// The configured sizes; what an arena holds follows from them.
struct Plan {
  uint64_t data_bytes;      // for exchanges; divided anew for each layout
  uint64_t post_bytes;      // one chunk of point-to-point; two per source rank
  uint32_t first_sequence;  // counts start here; tests start just before the wrap
  uint32_t unused;
};

GFC_FN uint64_t align_down(uint64_t bytes, uint64_t unit) { return bytes / unit * unit; }
GFC_FN uint64_t align_up(uint64_t bytes, uint64_t unit) {
  return align_down(bytes + unit - 1, unit);
}

// Header page, signal lines, inboxes of point-to-point, inboxes of exchanges.
GFC_FN uint64_t signals_offset() { return kPageBytes; }
GFC_FN uint64_t posts_offset() {
  return signals_offset() + kMaxRanks * kNumLines * kLineBytes;
}
GFC_FN uint64_t data_offset(const Plan& plan) {
  return align_up(posts_offset() + kMaxRanks * kNumBanks * plan.post_bytes, kPageBytes);
}
GFC_FN uint64_t arena_bytes(const Plan& plan) {
  return align_up(data_offset(plan) + plan.data_bytes, kPageBytes);
}

GFC_FN uint64_t line_offset(int source_rank, uint32_t line) {
  return signals_offset() + (source_rank * kNumLines + line) * kLineBytes;
}

GFC_FN Span post_inbox(const Plan& plan, int source_rank, uint64_t count) {
  const uint64_t idx = source_rank * kNumBanks + count % kNumBanks;
  return {posts_offset() + idx * plan.post_bytes, plan.post_bytes};
}

// Where slot `source` of a group writes in the arena of every other rank for this instance.
GFC_FN Span exchange_inbox(const Plan& plan, Region region, int group_size, uint64_t instance,
                           int source) {
  const uint64_t unit = plan.data_bytes >= kPageBytes ? kLineBytes : 1;  // 1: the checker's cells
  const uint64_t bank = plan.data_bytes / region.count / kNumBanks;
  const uint64_t inbox = align_down(bank / group_size, unit);
  const uint64_t bank_idx = region.idx * kNumBanks + instance % kNumBanks;
  return {data_offset(plan) + align_down(bank_idx * bank, unit) + source * inbox, inbox};
}

GFC_FN uint64_t plan_hash(const Plan& plan) {
  uint64_t hash = mix(kVersion, plan.data_bytes);
  hash = mix(hash, plan.post_bytes);
  return mix(mix(hash, plan.first_sequence), arena_bytes(plan));
}

}  // namespace gfc
