#include "reshard.h"

namespace gfc {
namespace {

int64_t sum_before(const int64_t* sizes, int slot) {
  int64_t sum = 0;
  for (int i = 0; i < slot; ++i) sum += sizes[i];
  return sum;
}

Block block_of(const Part& part, int source, int target, char* base, const int64_t* strides) {
  Block block{base, part.num_dims, part.item_bytes, {}, {}};
  for (int dim = 0; dim < part.num_dims; ++dim) {
    block.extent[dim] = part.shape[dim];
    block.stride[dim] = strides[dim];
  }
  if (part.split_dim >= 0) block.extent[part.split_dim] = part.split_sizes[target];
  block.extent[part.concat_dim] = part.concat_sizes[source];
  return block;
}

// Calls move(block, first byte in it, byte count, offset in the round's chunk) for each piece of
// the message's bytes [begin, begin + limit).
template <class BlockOf, class Move>
void for_chunk(int num_parts, BlockOf block_at, uint64_t begin, uint64_t limit, Move move) {
  uint64_t part_begin = 0;
  for (int i = 0; i < num_parts; ++i) {
    const Block block = block_at(i);
    const uint64_t part_end = part_begin + bytes_of(block);
    const uint64_t from = part_begin > begin ? part_begin : begin;
    const uint64_t to = part_end < begin + limit ? part_end : begin + limit;
    if (from < to) move(block, from - part_begin, to - from, from - begin);
    part_begin = part_end;
  }
}

}  // namespace

Block outgoing(const Part& part, int source, int target) {
  Block block = block_of(part, source, target, part.input, part.input_stride);
  if (part.split_dim >= 0) {
    block.base += sum_before(part.split_sizes, target) * part.input_stride[part.split_dim];
  }
  return block;
}

Block incoming(const Part& part, int source, int target) {
  Block block = block_of(part, source, target, part.output, part.output_stride);
  block.base += sum_before(part.concat_sizes, source) * part.output_stride[part.concat_dim];
  return block;
}

uint64_t Reshard::longest_message() const {
  uint64_t longest = 0;
  for (int source = 0; source < subgroup_.size; ++source) {
    for (int target = 0; target < subgroup_.size; ++target) {
      if (source == target) continue;
      uint64_t bytes = 0;
      for (int i = 0; i < num_parts_; ++i) bytes += bytes_of(outgoing(parts_[i], source, target));
      if (bytes > longest) longest = bytes;
    }
  }
  return longest;
}

void Reshard::push(int rank, int slot, Span inbox) {
  char* target = mem_.base(rank) + inbox.offset;
  for_chunk(
      num_parts_, [&](int i) { return outgoing(parts_[i], subgroup_.own, slot); },
      round_ * inbox.bytes, inbox.bytes,
      [&](const Block& block, uint64_t first, uint64_t count, uint64_t at) {
        pack(block, first, count, target + at);
      });
}

void Reshard::collect(int slot, Span inbox) {
  const char* source = mem_.base(mem_.rank()) + inbox.offset;
  for_chunk(
      num_parts_, [&](int i) { return incoming(parts_[i], slot, subgroup_.own); },
      round_ * inbox.bytes, inbox.bytes,
      [&](const Block& block, uint64_t first, uint64_t count, uint64_t at) {
        unpack(source + at, first, count, block);
      });
}

void Reshard::keep() {
  if (round_ != 0) return;
  for (int i = 0; i < num_parts_; ++i) {
    copy(outgoing(parts_[i], subgroup_.own, subgroup_.own),
         incoming(parts_[i], subgroup_.own, subgroup_.own));
  }
}

}  // namespace gfc
