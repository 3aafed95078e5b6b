// The protocol's memory on NVIDIA GPUs, and the few primitives that name their order and scope.
//
// Arenas are VMM allocations that every rank maps; a line of a peer is written over NVLink. Ranks that do
// not reach each other's memory have arenas in host memory for each other.
#pragma once

#include "context.h"

namespace gfc {

__device__ inline uint64_t load_acquire_sys(const void* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64_t load_relaxed_sys(const void* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void store_release_sys(void* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void store_relaxed_sys(void* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

__device__ inline uint64_t timer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Waits until a link of this rate has moved so many bytes since `began_ns`; 0: no limit.
__device__ inline void pace(uint32_t link_mb_per_s, uint64_t began_ns, uint64_t bytes) {
  if (link_mb_per_s == 0) return;
  while (timer_ns() < began_ns + bytes * 1000 / link_mb_per_s) __nanosleep(200);
}

// How many polls lie between two looks at the clock and at the host's abort word, which is a read
// over PCIe: 157 ns a poll on an H200, so a stop is noticed within about 0.3 ms.
constexpr uint32_t kPollsPerLook = 2048;

// The same where the word that is polled lies in host memory, too: above 1 us a poll.
constexpr uint32_t kPollsPerHostLook = 256;

__device__ inline uint32_t add_relaxed_gpu(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old) : "l"(address), "r"(value) : "memory");
  return old;
}

class CudaMemory {
 public:
  __device__ explicit CudaMemory(const Context& context)
      : context_(context), rank_(context.rank) {}

  __device__ const Plan& plan() const { return context_.plan; }
  __device__ char* base(int rank) const { return reinterpret_cast<char*>(context_.base[rank]); }
  __device__ char* inbox(int source) const { return reinterpret_cast<char*>(context_.inbox[source]); }

  __device__ Word load_acquire(int source, uint32_t line) const {
    return unpack(load_acquire_sys(inbox(source) + line_offset(source, line)));
  }
  __device__ void restart_line(int source, uint32_t line, Word value) {
    store_relaxed_sys(inbox(source) + line_offset(source, line), pack(value));
  }
  __device__ void publish(int rank, uint32_t line, Word value) {
    store_release_sys(base(rank) + line_offset(rank_, line), pack(value));
  }
  __device__ uint64_t aborted_through() const {
    return load_relaxed_sys(reinterpret_cast<const void*>(context_.aborted_through));
  }
  __device__ uint64_t now_ns() const { return timer_ns(); }
  // Several threads may fail at once; `leave` lets one of them report.
  __device__ void report(const Record&) {}

  struct Backoff {
    __device__ explicit Backoff(CudaMemory&) {}
    uint32_t polls = 0;
  };
  __device__ bool pause(Backoff& backoff) { return ++backoff.polls % kPollsPerLook == 0; }

 private:
  const Context& context_;
  int rank_;
};

__device__ inline void tell_host(const Context& context, const Record& failure) {
  const uint64_t* words = reinterpret_cast<const uint64_t*>(&failure);
  uint64_t* host = reinterpret_cast<uint64_t*>(context.record);
  // The status, in the first word, comes last: who sees the first one sees the rest. A later failure
  // may be written while a host reads; a task's own record (`Outcome`) is read on the device.
  for (int i = sizeof(Record) / sizeof(uint64_t) - 1; i > 0; --i) store_relaxed_sys(host + i, words[i]);
  store_release_sys(host, words[0]);
}

// Poisons the task: its later collectives return at once, and the worker discards its output.
__device__ inline void leave(Context& context, const Record& failure) {
  if (atomicExch(&context.poison_lock, 1u) != 0) return;
  context.task.failure = failure;
  __threadfence();
  tell_host(context, failure);
}

__device__ inline bool is_poisoned(const Context& context) {
  return *reinterpret_cast<const volatile int32_t*>(&context.task.failure.status) != kOk;
}

}  // namespace gfc
