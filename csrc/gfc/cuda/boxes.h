// Which bytes go where: the message of one tensor from one rank to another, as a box of rows.
// Host code includes this too, for tests without a GPU.
#pragma once

#include "context.h"

namespace gfc {

constexpr int kBoxDims = 4;

// Rows of `row_bytes`, dense on both sides, in row-major order of up to four dimensions (the last
// one innermost). The order of bytes is the same on both sides whatever was merged.
struct Box {
  uint64_t source, target;  // offsets in the input, and in the result of the target
  int64_t row_bytes;
  uint32_t num_rows;
  int32_t num_dims;
  uint32_t extent[kBoxDims];
  int64_t source_stride[kBoxDims], target_stride[kBoxDims];
};

GFC_FN int64_t sum_of(const int32_t* sizes, int count) {
  int64_t sum = 0;
  for (int i = 0; i < count; ++i) sum += sizes[i];
  return sum;
}

// The sum of the sizes of the slots from `begin` in turn, up to but not including `end`.
GFC_FN int64_t sum_in_turn(const int32_t* sizes, int num_slots, int begin, int end) {
  int64_t sum = 0;
  for (int slot = begin; slot != end; slot = (slot + 1) % num_slots) sum += sizes[slot];
  return sum;
}

// Where a source's part begins in the concatenation of a target. One that begins with the target's
// own part has the same places on every rank, so that what is captured with it knows no slot.
GFC_FN int64_t concat_begin_of(const Move& move, int num_slots, int source, int target) {
  if (move.is_rotated == 0) return sum_of(move.concat_sizes, source);
  return sum_in_turn(move.concat_sizes, num_slots, target, source);
}

GFC_FN Box box_of(const Move& move, int num_slots, int source, int target) {
  // Where the target's part begins in the input.
  const int64_t split_begin = move.is_split == 0 ? 0 : sum_of(move.split_sizes, target);
  const int64_t split = move.split_sizes[target], concat = move.concat_sizes[source];
  const int64_t concat_begin = concat_begin_of(move, num_slots, source, target);
  const int64_t concat_all = sum_of(move.concat_sizes, num_slots);
  const bool is_concat_first = move.is_concat_first != 0;
  // The result of the target is dense: [outer, first, middle, second, inner].
  const int64_t second_all = is_concat_first ? split : concat_all;
  const int64_t first_all = is_concat_first ? concat_all : split;
  const int64_t middle_step = second_all * move.inner_bytes;
  const int64_t first_step = move.middle * middle_step;
  const int64_t extents[] = {is_concat_first ? split : concat, move.middle,
                             is_concat_first ? concat : split, move.outer};
  const int64_t from[] = {move.second_stride, move.middle_stride, move.first_stride,
                          move.outer_stride};
  const int64_t to[] = {move.inner_bytes, middle_step, first_step, first_all * first_step};
  Box box{};
  box.source = split_begin * (is_concat_first ? move.second_stride : move.first_stride);
  box.target = concat_begin * (is_concat_first ? first_step : move.inner_bytes);
  box.row_bytes = move.inner_bytes;
  box.num_rows = 1;
  bool is_dense = true;  // so far, from the inside
#pragma unroll
  for (int dim = 0; dim < kBoxDims; ++dim) {
    if (extents[dim] == 1) continue;
    if (is_dense && from[dim] == box.row_bytes && to[dim] == box.row_bytes) {
      box.row_bytes *= extents[dim];
      continue;
    }
    is_dense = false;
    box.num_rows *= static_cast<uint32_t>(extents[dim]);
    // Written from the inside out; `locate` walks in this order.
    box.extent[box.num_dims] = static_cast<uint32_t>(extents[dim]);
    box.source_stride[box.num_dims] = from[dim];
    box.target_stride[box.num_dims] = to[dim];
    ++box.num_dims;
  }
  return box;
}

struct Place {
  uint64_t source, target;
};

// Where row `row` of a box begins on both sides.
GFC_FN Place locate(const Box& box, uint32_t row) {
  Place place{box.source, box.target};
#pragma unroll
  for (int dim = 0; dim < kBoxDims; ++dim) {
    if (dim >= box.num_dims) break;
    const bool is_last = dim + 1 == box.num_dims;
    const uint32_t next = is_last ? 0 : row / box.extent[dim];
    const uint32_t idx = is_last ? row : row - next * box.extent[dim];
    place.source += idx * box.source_stride[dim];
    place.target += idx * box.target_stride[dim];
    row = next;
  }
  return place;
}

// Messages to results that leave the arena lie there packed, one source's behind the other's: it
// is then the receiver, in its own memory, that scatters short rows, and not a link.
GFC_FN uint64_t packed_offset(const Move& move, int source, int target) {
  const int64_t split = move.split_sizes[target];
  return sum_of(move.concat_sizes, source) * split * move.outer * move.middle * move.inner_bytes;
}

GFC_FN Box as_packed(Box box, uint64_t offset) {
  box.target = offset;
  int64_t step = box.row_bytes;
#pragma unroll
  for (int dim = 0; dim < kBoxDims; ++dim) {
    if (dim >= box.num_dims) break;
    box.target_stride[dim] = step;
    step *= box.extent[dim];
  }
  return box;
}

// From the packed form to the result.
GFC_FN Box as_unpacked(const Box& box, uint64_t offset) {
  const Box packed = as_packed(box, offset);
  Box out = box;
  out.source = packed.target;
#pragma unroll
  for (int dim = 0; dim < kBoxDims; ++dim) out.source_stride[dim] = packed.target_stride[dim];
  return out;
}

GFC_FN uint64_t bytes_of(const Box& box) {
  return static_cast<uint64_t>(box.row_bytes) * box.num_rows;
}

}  // namespace gfc
