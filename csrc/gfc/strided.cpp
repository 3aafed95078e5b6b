#include "strided.h"

#include <cstring>

namespace gfc {
namespace {

// Drops dimensions of extent 1 and joins those that lie behind each other in every view. What
// remains of the innermost dimension, if it is contiguous everywhere, becomes the run.
struct Rows {
  int num_dims = 0;
  int64_t extent[kMaxDims];
  int64_t stride[2][kMaxDims];
  int64_t run_bytes = 0;
  int64_t num_rows = 1;
};

Rows rows_of(const Block& a, const Block& b) {
  Rows rows;
  rows.run_bytes = a.item_bytes;
  for (int dim = 0; dim < a.num_dims; ++dim) {
    if (a.extent[dim] == 1) continue;
    const int last = rows.num_dims - 1;
    const bool joins = last >= 0 && rows.stride[0][last] == a.extent[dim] * a.stride[dim] &&
                       rows.stride[1][last] == a.extent[dim] * b.stride[dim];
    const int at = joins ? last : rows.num_dims++;
    rows.extent[at] = joins ? rows.extent[at] * a.extent[dim] : a.extent[dim];
    rows.stride[0][at] = a.stride[dim];
    rows.stride[1][at] = b.stride[dim];
  }
  const int last = rows.num_dims - 1;
  if (last >= 0 && rows.stride[0][last] == rows.run_bytes &&
      rows.stride[1][last] == rows.run_bytes) {
    rows.run_bytes *= rows.extent[last];
    --rows.num_dims;
  }
  for (int dim = 0; dim < rows.num_dims; ++dim) rows.num_rows *= rows.extent[dim];
  return rows;
}

// Walks rows in row-major order from any of them on.
class Cursor {
 public:
  Cursor(const Rows& rows, int64_t row) : rows_(rows) {
    for (int dim = rows.num_dims - 1; dim >= 0; --dim) {
      index_[dim] = row % rows.extent[dim];
      row /= rows.extent[dim];
      for (int side = 0; side < 2; ++side) {
        offset_[side] += index_[dim] * rows.stride[side][dim];
      }
    }
  }
  int64_t offset(int side) const { return offset_[side]; }
  void advance() {
    for (int dim = rows_.num_dims - 1; dim >= 0; --dim) {
      const bool wraps = ++index_[dim] == rows_.extent[dim];
      const int64_t steps = wraps ? 1 - rows_.extent[dim] : 1;
      for (int side = 0; side < 2; ++side) offset_[side] += steps * rows_.stride[side][dim];
      if (!wraps) return;
      index_[dim] = 0;
    }
  }

 private:
  const Rows& rows_;
  int64_t index_[kMaxDims] = {};
  int64_t offset_[2] = {};
};

// Constant sizes compile to single moves: what a transposed tensor, whose runs are single
// elements, spends its time in.
inline void copy_run(char* to, const char* from, int64_t bytes) {
  switch (bytes) {
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    default: memcpy(to, from, static_cast<size_t>(bytes));
  }
}

template <class MoveRun>
void for_range(const Block& block, uint64_t first, uint64_t count, MoveRun move) {
  if (count == 0) return;
  const Rows rows = rows_of(block, block);
  const int64_t run = rows.run_bytes;
  Cursor cursor(rows, static_cast<int64_t>(first) / run);
  int64_t skip = static_cast<int64_t>(first) % run;
  for (int64_t done = 0, left = static_cast<int64_t>(count); left > 0; cursor.advance()) {
    const int64_t bytes = run - skip < left ? run - skip : left;
    move(block.base + cursor.offset(0) + skip, done, bytes);
    done += bytes;
    left -= bytes;
    skip = 0;
  }
}

}  // namespace

uint64_t bytes_of(const Block& block) {
  int64_t bytes = block.item_bytes;
  for (int dim = 0; dim < block.num_dims; ++dim) bytes *= block.extent[dim];
  return static_cast<uint64_t>(bytes);
}

void pack(const Block& block, uint64_t first, uint64_t count, char* packed) {
  for_range(block, first, count, [packed](const char* run, int64_t at, int64_t bytes) {
    copy_run(packed + at, run, bytes);
  });
}

void unpack(const char* packed, uint64_t first, uint64_t count, const Block& block) {
  for_range(block, first, count, [packed](char* run, int64_t at, int64_t bytes) {
    copy_run(run, packed + at, bytes);
  });
}

void copy(const Block& from, const Block& to) {
  if (bytes_of(from) == 0) return;
  const Rows rows = rows_of(from, to);
  Cursor cursor(rows, 0);
  for (int64_t row = 0; row < rows.num_rows; ++row, cursor.advance()) {
    copy_run(to.base + cursor.offset(1), from.base + cursor.offset(0), rows.run_bytes);
  }
}

}  // namespace gfc
