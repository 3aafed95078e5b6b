// Copies between strided tensors and contiguous bytes, in whole or a range of bytes at a time.
#pragma once

#include <cstdint>

namespace gfc {

constexpr int kMaxDims = 8;

// A block of a tensor: extents, and the distance in bytes between neighbours of each dimension.
struct Block {
  char* base;
  int num_dims;
  int64_t item_bytes;
  int64_t extent[kMaxDims];
  int64_t stride[kMaxDims];
};

uint64_t bytes_of(const Block& block);

// The packed form of a block is its elements in row-major order. These two move the bytes
// [first, first + count) of it between the block and contiguous memory.
void pack(const Block& block, uint64_t first, uint64_t count, char* packed);
void unpack(const char* packed, uint64_t first, uint64_t count, const Block& block);

// Copies a whole block to one of the same extents.
void copy(const Block& from, const Block& to);

}  // namespace gfc
