#include "cpu_memory.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>
#include <new>

namespace gfc {
namespace {

constexpr uint64_t kMagic = 0x61726e6561676663ull;  // "cfgaenra"
constexpr int kSpins = 64;  // about 2 us: a peer that runs on another core answers within it
constexpr int kYields = 8;    // lets ranks that share this core run, without the cost of a futex
constexpr long kSleepNs = 50 * 1000 * 1000;  // how late a time-out or an abort may be noticed

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  // Not FUTEX_PRIVATE_FLAG: the word lies in memory that several processes map.
  return syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

}  // namespace

void format_arena(char* base, const Plan& plan, int rank, uint32_t incarnation) {
  ArenaHeader* header = new (base) ArenaHeader{};
  header->plan_hash = plan_hash(plan);
  header->rank = static_cast<uint32_t>(rank);
  header->incarnation = incarnation;
  const uint64_t start = pack(Word{0, plan.first_sequence});
  for (int source = 0; source < kMaxRanks; ++source) {
    for (uint32_t line = 0; line < kNumLines; ++line) {
      const uint64_t first = line < kExchangeLine ? 0 : start;  // entries: 0 is "never"
      new (base + line_offset(source, line)) std::atomic<uint64_t>(first);
    }
  }
  header->magic = kMagic;
}

bool check_arena(const char* base, const Plan& plan, int rank, uint32_t incarnation) {
  const ArenaHeader* header = reinterpret_cast<const ArenaHeader*>(base);
  return header->magic == kMagic && header->plan_hash == plan_hash(plan) &&
         header->rank == static_cast<uint32_t>(rank) && header->incarnation == incarnation;
}

void abort_through(char* base, uint64_t dispatch) {
  ArenaHeader& header = *reinterpret_cast<ArenaHeader*>(base);
  uint64_t current = header.aborted_through.load();
  while (current < dispatch && !header.aborted_through.compare_exchange_weak(current, dispatch)) {
  }
  CpuBell bell(header, 0);
  ring(bell);
}

Record last_failure(const char* base) {
  const ArenaHeader& header = *reinterpret_cast<const ArenaHeader*>(base);
  uint64_t words[sizeof(Record) / sizeof(uint64_t)];
  for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); ++i) {
    words[i] = header.failure[i].load(std::memory_order_relaxed);
  }
  Record record;
  memcpy(&record, words, sizeof(record));
  return record;
}

int CpuBell::num_polls() const { return num_spins_ + kYields; }

void CpuBell::relax(int poll) const {
  if (poll >= num_spins_) {
    sched_yield();
    return;
  }
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void CpuBell::wake() { futex(header_.bell, FUTEX_WAKE, INT_MAX, nullptr); }

void CpuBell::sleep(uint32_t heard) {
  const timespec timeout{0, kSleepNs};
  futex(header_.bell, FUTEX_WAIT, heard, &timeout);  // any outcome: the caller polls again
}

// Spinning helps only while every rank has a core: otherwise it holds up the rank waited for
// (all-to-all of 4 KB, 4 ranks on 2 cores, medians: 52 us without spins, 59 us with them).
void CpuMemory::map(int rank, char* base) {
  base_[rank] = base;
  int num_ranks = 0;
  for (const char* mapped : base_) num_ranks += mapped != nullptr;
  cpu_set_t cores;
  const bool is_known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  num_spins_ = is_known && CPU_COUNT(&cores) >= num_ranks ? kSpins : 0;
}

uint64_t CpuMemory::now_ns() const {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000ull + static_cast<uint64_t>(now.tv_nsec);
}

void CpuMemory::report(const Record& record) {
  uint64_t words[sizeof(Record) / sizeof(uint64_t)];
  memcpy(words, &record, sizeof(record));
  for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); ++i) {
    header(rank_).failure[i].store(words[i], std::memory_order_relaxed);
  }
}

}  // namespace gfc
