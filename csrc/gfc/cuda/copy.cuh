// Copies of boxes between a tensor and an arena: by threads, and by the tensor memory accelerator.
#pragma once

#include "boxes.h"
#include "memory.cuh"

namespace gfc {

// Copies the units `first`, `first + step`, ... below `end` of a box; both sides are divisible by the unit.
// Eight loads are in flight before the first store: a load takes 0.6 us, a link needs 2.9 B/ns
// from each SM to be full.
template <class Unit>
__device__ void copy_units(const char* from, char* to, const Box& box, uint32_t first, uint32_t step,
                           uint32_t end) {
  constexpr int kInFlight = 8;
  const uint32_t row_units = static_cast<uint32_t>(box.row_bytes / sizeof(Unit));
  const uint32_t num_units = min(row_units * box.num_rows, end);
  for (uint32_t begin = first; begin < num_units; begin += step * kInFlight) {
    Unit value[kInFlight];
    char* target[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t unit = begin + i * step;
      if (unit < num_units) {
        const uint32_t row = box.num_dims == 0 ? 0 : unit / row_units;
        const uint64_t column = static_cast<uint64_t>(unit - row * row_units) * sizeof(Unit);
        const Place place = locate(box, row);
        value[i] = *reinterpret_cast<const Unit*>(from + place.source + column);
        target[i] = to + place.target + column;
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (begin + i * step < num_units) *reinterpret_cast<Unit*>(target[i]) = value[i];
    }
  }
}

__device__ inline void copy_box(const char* from, char* to, const Box& box, uint32_t unit_bytes,
                                uint32_t first, uint32_t step, uint32_t end = ~0u) {
  switch (unit_bytes) {
    case 16: return copy_units<uint4>(from, to, box, first, step, end);
    case 8: return copy_units<uint2>(from, to, box, first, step, end);
    case 4: return copy_units<uint32_t>(from, to, box, first, step, end);
    case 2: return copy_units<uint16_t>(from, to, box, first, step, end);
    default: return copy_units<uint8_t>(from, to, box, first, step, end);
  }
}

// What lies in the result on both sides: for copies from the arena to the caller's tensor.
__device__ inline Box as_result(Box box) {
  box.source = box.target;
  for (int dim = 0; dim < kBoxDims; ++dim) box.source_stride[dim] = box.target_stride[dim];
  return box;
}

#if __CUDA_ARCH__ >= 900

constexpr int kStages = 4;
constexpr int kAhead = kStages - 2;  // loads run so far ahead of stores

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void load_bulk(uint32_t shared, const char* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ inline void store_bulk(char* to, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared),
               "r"(bytes) : "memory");
}

__device__ inline void await_barrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;"
      " @done bra over; bra again; over: }" ::"r"(barrier), "r"(parity) : "memory");
}

// A box in tiles: whole rows where they fit, or parts of one row. The first part of a row is so much
// shorter that the next ones begin at whole lines of the target: a link carries a write that
// straddles lines in two packets (measured: 222 GB/s in place of 310).
struct Tiles {
  uint32_t count, rows_per_tile, parts_per_row, part_bytes, first_part_bytes;
  bool is_source_dense, is_target_dense;  // rows of a tile lie behind each other
};

constexpr uint32_t kLinkLineBytes = 128;

__device__ inline Tiles tiles_of(const Box& box, const char* to, uint32_t tile_bytes) {
  Tiles tiles{};
  const uint64_t row = box.row_bytes;
  if (row == 0 || box.num_rows == 0) return tiles;
  if (row > tile_bytes) {
    const uint32_t skew = (reinterpret_cast<uint64_t>(to) + box.target) % kLinkLineBytes;
    tiles.rows_per_tile = 1;
    tiles.part_bytes = tile_bytes;
    tiles.first_part_bytes = tile_bytes - skew;
    tiles.parts_per_row = static_cast<uint32_t>((row + skew + tile_bytes - 1) / tile_bytes);
    tiles.count = box.num_rows * tiles.parts_per_row;
    return tiles;
  }
  tiles.rows_per_tile = tile_bytes / static_cast<uint32_t>(row);
  tiles.part_bytes = static_cast<uint32_t>(row);
  tiles.parts_per_row = 1;
  tiles.count = (box.num_rows + tiles.rows_per_tile - 1) / tiles.rows_per_tile;
  tiles.is_source_dense = box.num_dims == 1 && box.source_stride[0] == box.row_bytes;
  tiles.is_target_dense = box.num_dims == 1 && box.target_stride[0] == box.row_bytes;
  return tiles;
}

// The copies of a box by one warp of the block through the block's shared memory. State of the
// barriers carries over from box to box.
class BulkCopier {
 public:
  // One warp, all lanes; `shared` holds kStages tiles behind the barriers.
  __device__ BulkCopier(char* shared, uint64_t* barriers, uint32_t tile_bytes)
      : shared_(shared_address(shared)), barriers_(shared_address(barriers)), tile_bytes_(tile_bytes) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barriers_ + 8 * stage) : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async;" ::: "memory");
    }
    __syncwarp();
  }

  // Copies the tiles first, first + step, ... When it returns, this warp's writes are complete
  // and visible to the lane that issued them.
  __device__ void copy(const char* from, char* to, const Box& box, uint32_t first, uint32_t step) {
    const Tiles tiles = tiles_of(box, to, tile_bytes_);
    if (first >= tiles.count) return;
    const uint32_t count = (tiles.count - first + step - 1) / step;
    for (uint32_t n = 0; n < kAhead && n < count; ++n) load(from, box, tiles, first + n * step, n);
    for (uint32_t n = 0; n < count; ++n) {
      if (n + kAhead < count) {
        // The stage was last read by the store of tile n - 2; only that of n - 1 may be pending.
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        __syncwarp();
        load(from, box, tiles, first + (n + kAhead) * step, n + kAhead);
      }
      const uint32_t use = used_ + n;
      await_barrier(barriers_ + 8 * (use % kStages), (use / kStages) % 2);
      store(to, box, tiles, first + n * step, use % kStages);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    used_ += count;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
  }

  // Between an acquire and bulk copies of what it has made visible.
  __device__ void before_reading() { asm volatile("fence.proxy.async;" ::: "memory"); }

 private:
  __device__ uint32_t rows_in(const Box& box, const Tiles& tiles, uint32_t tile) const {
    const uint32_t begin = tile / tiles.parts_per_row * tiles.rows_per_tile;
    return min(tiles.rows_per_tile, box.num_rows - begin);
  }
  __device__ uint32_t bytes_in(const Box& box, const Tiles& tiles, uint32_t tile) const {
    if (tiles.parts_per_row == 1) return tiles.part_bytes;
    const uint32_t part = tile % tiles.parts_per_row;
    const uint64_t end = tiles.first_part_bytes + static_cast<uint64_t>(part) * tiles.part_bytes;
    return static_cast<uint32_t>(min(end, static_cast<uint64_t>(box.row_bytes)) - column_of(tiles, tile));
  }
  // Where in its row a tile begins.
  __device__ uint64_t column_of(const Tiles& tiles, uint32_t tile) const {
    const uint32_t part = tile % tiles.parts_per_row;
    if (part == 0) return 0;
    return tiles.first_part_bytes + static_cast<uint64_t>(part - 1) * tiles.part_bytes;
  }
  __device__ void load(const char* from, const Box& box, const Tiles& tiles, uint32_t tile, uint32_t n) {
    const uint32_t stage = (used_ + n) % kStages, barrier = barriers_ + 8 * stage;
    const uint32_t rows = rows_in(box, tiles, tile), bytes = bytes_in(box, tiles, tile);
    const uint32_t buffer = shared_ + stage * tile_bytes_;
    if (threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(rows * bytes) : "memory");
    }
    __syncwarp();
    const uint64_t column = column_of(tiles, tile);
    const uint32_t row = tile / tiles.parts_per_row * tiles.rows_per_tile;
    if (tiles.is_source_dense) {
      if (threadIdx.x == 0) load_bulk(buffer, from + locate(box, row).source, rows * bytes, barrier);
      return;
    }
    for (uint32_t i = threadIdx.x; i < rows; i += 32) {
      load_bulk(buffer + i * bytes, from + locate(box, row + i).source + column, bytes, barrier);
    }
  }
  __device__ void store(char* to, const Box& box, const Tiles& tiles, uint32_t tile, uint32_t stage) {
    const uint32_t rows = rows_in(box, tiles, tile), bytes = bytes_in(box, tiles, tile);
    const uint32_t buffer = shared_ + stage * tile_bytes_;
    const uint64_t column = column_of(tiles, tile);
    const uint32_t row = tile / tiles.parts_per_row * tiles.rows_per_tile;
    if (tiles.is_target_dense) {
      if (threadIdx.x == 0) store_bulk(to + locate(box, row).target, buffer, rows * bytes);
      return;
    }
    for (uint32_t i = threadIdx.x; i < rows; i += 32) {
      store_bulk(to + locate(box, row + i).target + column, buffer + i * bytes, bytes);
    }
  }

  uint32_t shared_, barriers_, tile_bytes_;
  uint32_t used_ = 0;  // uses of stages so far: picks the stage and its barrier's parity
};

#endif  // __CUDA_ARCH__ >= 900

}  // namespace gfc
