// CUDA's words as C++, for kernels.cu on a CPU: a block is 32 threads of this process, and the blocks of a launch
// run one after the other. Ranks are processes, so all that they share runs concurrently.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
#define __shared__ static
#define GFC_EMULATED 1

struct Dim {
  unsigned x;
};
inline thread_local Dim threadIdx;
inline Dim blockIdx, blockDim, gridDim;
inline pthread_barrier_t block_barrier;

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline void __syncthreads() { pthread_barrier_wait(&block_barrier); }
inline void __syncwarp() { __syncthreads(); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
template <class T>
T __ldcg(const T* address) {
  return __atomic_load_n(address, __ATOMIC_RELAXED);
}
template <class T, class U>
T atomicExch(T* address, U value) {
  return __atomic_exchange_n(address, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
inline uint64_t emulated_now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}
inline void __nanosleep(unsigned) {}
// After a look that may be one of many: who is waited for may need this core.
inline void rest() {
  static thread_local unsigned looks = 0;
  if (++looks % 4 == 0) sched_yield();
}
using std::max;
using std::min;

template <class Kernel>
void launch(unsigned grid, unsigned block, Kernel kernel) {
  gridDim.x = grid;
  blockDim.x = block;
  pthread_barrier_init(&block_barrier, nullptr, block);
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    std::vector<std::thread> threads;
    for (unsigned idx = 0; idx < block; ++idx) {
      threads.emplace_back([=] {
        threadIdx.x = idx;
        kernel();
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  pthread_barrier_destroy(&block_barrier);
}
