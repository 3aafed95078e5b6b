// The protocol's memory on CPUs: arenas in shared memory, C++ atomics, futexes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "parking.h"
#include "protocol.h"

namespace gfc {

// The first page of an arena. `format_arena` writes the first four before anyone else maps it.
struct ArenaHeader {
  uint64_t magic;
  uint64_t plan_hash;
  uint32_t rank;
  uint32_t incarnation;
  // Written by the host and by peers (maximum), read by the owner in every wait.
  alignas(kLineBytes) std::atomic<uint64_t> aborted_through;
  // Rung by whoever publishes to the owner; the owner counts its sleepers in `parked`.
  alignas(kLineBytes) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> parked;
  // Written by the owner, read by the host: the last failure, word by word. Relaxed: the host
  // reads it after the rank has reported or died.
  alignas(kLineBytes) std::atomic<uint64_t> failure[sizeof(Record) / sizeof(uint64_t)];
};
static_assert(sizeof(ArenaHeader) <= kPageBytes);
// CUDA ranks pin this page; gfgen/gfc/cuda/device_arena.py knows these offsets.
static_assert(offsetof(ArenaHeader, aborted_through) == 128 && offsetof(ArenaHeader, failure) == 384);
static_assert(sizeof(Record) % sizeof(uint64_t) == 0);
static_assert(std::atomic<uint64_t>::is_always_lock_free, "lines are shared between processes");
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void format_arena(char* base, const Plan& plan, int rank, uint32_t incarnation);
bool check_arena(const char* base, const Plan& plan, int rank, uint32_t incarnation);

// Gives up every dispatch up to this number on the arena's owner. The word only rises, so nobody
// has to clear it and an abort that comes late cannot hit the next task.
void abort_through(char* base, uint64_t dispatch);
Record last_failure(const char* base);

// The doorbell in one arena; what `Backoff` and `ring` need.
class CpuBell {
 public:
  CpuBell(ArenaHeader& header, int num_spins) : header_(header), num_spins_(num_spins) {}
  void ring() { header_.bell.fetch_add(1); }
  bool is_parked() const { return header_.parked.load() != 0; }
  void add_parked(int n) { header_.parked.fetch_add(static_cast<uint32_t>(n)); }
  uint32_t heard() const { return header_.bell.load(); }
  int num_polls() const;
  void relax(int poll) const;
  void wake();
  void sleep(uint32_t heard);

 private:
  ArenaHeader& header_;
  int num_spins_;  // polls before the first yield
};

class CpuMemory {
 public:
  CpuMemory(const Plan& plan, int rank) : plan_(plan), rank_(rank) {}

  const Plan& plan() const { return plan_; }
  int rank() const { return rank_; }
  void map(int rank, char* base);
  char* base(int rank) const { return base_[rank]; }

  Word load_acquire(int source, uint32_t line) const {
    return unpack(word(rank_, source, line).load(std::memory_order_acquire));
  }
  void restart_line(int source, uint32_t line, Word value) {
    word(rank_, source, line).store(pack(value), std::memory_order_relaxed);
  }
  void publish(int rank, uint32_t line, Word value) {
    word(rank, rank_, line).store(pack(value), std::memory_order_release);
    CpuBell bell(header(rank), 0);
    gfc::ring(bell);
  }
  uint64_t aborted_through() const {
    return header(rank_).aborted_through.load(std::memory_order_acquire);
  }
  uint64_t now_ns() const;
  void report(const Record& record);

  class Backoff {
   public:
    explicit Backoff(CpuMemory& mem) : bell_(mem.header(mem.rank_), mem.num_spins_), backoff_(bell_) {}
    bool pause() { return backoff_.pause(); }

   private:
    CpuBell bell_;
    gfc::Backoff<CpuBell> backoff_;
  };
  bool pause(Backoff& backoff) { return backoff.pause(); }

 private:
  ArenaHeader& header(int rank) const { return *reinterpret_cast<ArenaHeader*>(base_[rank]); }
  std::atomic<uint64_t>& word(int owner, int source, uint32_t line) const {
    char* address = base_[owner] + line_offset(source, line);
    return *reinterpret_cast<std::atomic<uint64_t>*>(address);
  }

  Plan plan_;
  int rank_;
  int num_spins_ = 0;
  char* base_[kMaxRanks] = {};
};

}  // namespace gfc
