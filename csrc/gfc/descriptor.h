// A group: the descriptor that travels with a dispatch, and the subgroups that follow from it.
//
// Making one allocates nothing and touches no other rank. Host and device code share this file.
#pragma once

#include "words.h"

namespace gfc {

constexpr int kMaxRanks = 8;

// Everything about a group. Arrays are indexed by slot; entries past `num_ranks` are zero.
struct Descriptor {
  uint64_t dispatch;  // rises globally, starts at 1; orders all tasks of the machine
  uint32_t incarnation[kMaxRanks];
  uint8_t rank[kMaxRanks];
  uint8_t num_ranks;
  uint8_t slot;  // own position
  // slot = ((cfg_idx * torus + torus_idx) * ring + ring_idx) * ulysses + ulysses_idx
  uint8_t cfg, ulysses, ring, torus;
  uint8_t unused[2];
};
static_assert(sizeof(Descriptor) == 56, "a descriptor fits in 64 bytes and has no padding");

// Which ranks of the layout exchange. Groups of one kind never overlap, so each rank counts the
// instances of a kind by itself and agrees with its peers.
enum Kind : uint32_t {
  kWhole,    // all ranks of the layout
  kHalf,     // the ranks that evaluate the same branch of classifier-free guidance
  kUlysses,  // ranks that split the heads of attention
  kRing,     // ranks that split its keys
  kPair,     // ranks at the same position of each half
  kTorus,    // ranks that split heads during attention
  kNumKinds,
};

// The slots first, first + step, ...; `own` is the position of this rank among them.
struct Subgroup {
  int first, step, size, own;
  GFC_FN int layout_slot(int idx) const { return first + idx * step; }
};

GFC_FN Subgroup subgroup_of(const Descriptor& group, uint32_t kind) {
  const int block = group.ring * group.ulysses, half = block * group.torus;
  const int slot = group.slot, in_half = slot % half, start = slot - in_half;
  const int in_block = in_half % block, torus_idx = in_half / block;
  const int ulysses_idx = in_block % group.ulysses, ring_idx = in_block / group.ulysses;
  switch (kind) {
    case kHalf: return {start, 1, half, in_half};
    case kUlysses: return {slot - ulysses_idx, 1, group.ulysses, ulysses_idx};
    case kRing: return {slot - in_block + ulysses_idx, group.ulysses, group.ring, ring_idx};
    case kTorus: return {start + in_block, block, group.torus, torus_idx};
    case kPair: return {in_half, half, group.cfg, slot / half};
    default: return {0, 1, group.num_ranks, slot};
  }
}

// Kinds with the same ranks are one kind, so that they share memory and a count.
GFC_FN uint32_t canonical(const Descriptor& group, uint32_t kind) {
  if (kind == kRing && group.ulysses * group.torus == 1) kind = kHalf;
  if (kind == kUlysses && group.ring * group.torus == 1) kind = kHalf;
  if (kind == kTorus && group.ulysses * group.ring == 1) kind = kHalf;
  if (kind == kPair && group.ulysses * group.ring * group.torus == 1) kind = kWhole;
  if (kind == kHalf && group.cfg == 1) kind = kWhole;
  return kind;
}

// The memory of a task is divided among the kinds of its layout that have more than one rank.
// Each kind needs banks of its own: ulysses groups {a,c},{b,d} and ring groups {a,b},{c,d} in
// turn would let a write to b while b still reads what d sent two exchanges ago.
struct Region {
  int idx, count;
};

GFC_FN Region region_of(const Descriptor& group, uint32_t kind) {
  Region region{0, 0};
  for (uint32_t other = 0; other < kNumKinds; ++other) {
    if (canonical(group, other) != other || subgroup_of(group, other).size == 1) continue;
    if (other == kind) region.idx = region.count;
    ++region.count;
  }
  return region;
}

// Hash of all but the own slot: equal on every rank of the group, and on no other group.
GFC_FN uint64_t seed_of(const Descriptor& group) {
  uint64_t seed = mix(0, group.dispatch);
  seed = mix(seed, group.cfg | (group.ulysses << 8) | (group.ring << 16) | (group.torus << 24));
  for (int slot = 0; slot < group.num_ranks; ++slot) {
    seed = mix(seed, (static_cast<uint64_t>(group.incarnation[slot]) << 8) | group.rank[slot]);
  }
  return seed;
}

}  // namespace gfc
