// Signal words: the 64 bits that one rank writes and one other rank waits for.
//
// A word is {tag, sequence}. The sequence says whether the signal has come, the tag says that
// it belongs to this very exchange. Host and device code share this file.
#pragma once

#if defined(__CUDACC_RTC__)
// NVRTC has no standard headers.
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__)
#define GFC_FN __host__ __device__ inline
#else
#define GFC_FN inline
#endif

namespace gfc {

struct Word {
  uint32_t tag;
  uint32_t sequence;
};

GFC_FN uint64_t pack(Word word) {
  return (static_cast<uint64_t>(word.tag) << 32) | word.sequence;
}

GFC_FN Word unpack(uint64_t bits) {
  return Word{static_cast<uint32_t>(bits >> 32), static_cast<uint32_t>(bits)};
}

// How far `seen` lies after `expected`. Right across the wrap as long as the two are less than
// 2^31 apart. On a post they are at most two apart, on an exchange as many as a dispatch has, since
// these lines start anew at each entry; entries carry dispatch numbers, and an edge would have to
// rest for 2^31 dispatches (at 100 a second: 248 days).
GFC_FN int32_t distance(uint32_t seen, uint32_t expected) {
  return static_cast<int32_t>(seen - expected);
}

// One round of splitmix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit.
GFC_FN uint64_t mix(uint64_t state, uint64_t value) {
  uint64_t z = (state ^ value) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

GFC_FN uint32_t make_tag(uint64_t seed, uint32_t purpose, uint64_t instance) {
  return static_cast<uint32_t>(mix(mix(seed, purpose), instance) >> 32);
}

}  // namespace gfc
