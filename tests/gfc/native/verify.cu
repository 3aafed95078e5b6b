// Random-looking tensors on a device, and the comparison of what an exchange made of them.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

// What a result holds. is_back 0: [S, h, D] from sources' [L, H, D], the tokens concatenated;
// 1: [L, H, D] from sources' [S, h, D], the heads concatenated.
struct Expected {
  uint64_t result, errors;  // address of 16-bit items; of {count, first wrong item + 1}
  uint32_t seed[8];         // by source
  int sizes[8];             // by source: tokens, or heads
  int num_sources, is_back;
  int first;                // of this rank: first head, or first token
  int tokens, heads;        // of the result
  int source_heads;         // of every source, when is_back is 0
  int dim;
  int unused;
};

__device__ uint16_t item_of(uint32_t seed, uint32_t idx) {
  uint32_t h = (idx + 0x9e3779b9u) * 0x85ebca6bu ^ seed;
  h ^= h >> 15;
  h *= 0x2c1b3c6du;
  h ^= h >> 12;
  h *= 0x297a2d39u;
  return static_cast<uint16_t>(h ^ (h >> 15));
}

extern "C" __global__ void fill(uint64_t address, uint32_t count, uint32_t seed) {
  uint16_t* items = reinterpret_cast<uint16_t*>(address);
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    items[i] = item_of(seed, i);
  }
}

extern "C" __global__ void verify(const __grid_constant__ Expected e) {
  const uint16_t* items = reinterpret_cast<const uint16_t*>(e.result);
  uint32_t* errors = reinterpret_cast<uint32_t*>(e.errors);
  const uint32_t count = static_cast<uint32_t>(e.tokens) * e.heads * e.dim;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const int d = i % e.dim, head = i / e.dim % e.heads, token = i / e.dim / e.heads;
    int source = 0, within = e.is_back ? head : token;
    while (within >= e.sizes[source]) within -= e.sizes[source++];
    const uint32_t idx = e.is_back ? ((e.first + token) * e.sizes[source] + within) * e.dim + d
                                   : (within * e.source_heads + e.first + head) * e.dim + d;
    if (items[i] != item_of(e.seed[source], idx)) {
      atomicAdd(errors, 1u);
      atomicCAS(errors + 1, 0u, i + 1);
    }
  }
}
