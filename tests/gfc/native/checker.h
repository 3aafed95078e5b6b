// An explicit-state model checker that drives the real protocol templates.
//
// Each rank runs as a coroutine and stops before every access to shared memory; the checker
// chooses who goes on, and searches all choices. It re-executes the schedule to come back to a
// state, so ranks may be any C++ code that is deterministic given what it reads.
//
// A state is the shared memory together with, for each rank, the hash of all values that it has
// read (which decides what a deterministic program does next). A poll that fails takes its reads
// back and blocks the rank until a polled word changes: spinning adds no states.
//
// Reported: a read of bytes that are not the expected ones; a data race (two ranks stand before
// accesses to the same bytes, one of them a write); a failed protocol status; a deadlock. Atomic
// accesses interleave sequentially consistently; since no data race is reachable, what release
// and acquire allow beyond that cannot be observed (the DRF guarantee; signals only pass messages,
// and the one place that needs more, parking.h, uses seq_cst).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "parking.h"
#include "protocol.h"

namespace check {

enum class Access {
  kStart,
  kLoad,
  kLoadMore,  // a further load of the same poll
  kStore,
  kRestart,
  kReadBytes,
  kWriteBytes,
  kBlocked,
  kSleep,
  kJoin,
};

// What a rank is about to do. Bytes are named by the arena's owner and an offset in it.
struct Pending {
  Access access = Access::kStart;
  int owner = 0;
  uint64_t offset = 0, bytes = 0;
};

struct Result {
  std::string fault;  // empty: every interleaving is right
  uint64_t states = 0;
  std::vector<std::string> trace;  // the schedule that leads to the fault
};

class World;

// The memory that a rank's protocol code sees.
class Memory {
 public:
  Memory(World& world, int rank) : world_(world), rank_(rank) {}

  const gfc::Plan& plan() const;
  gfc::Word load_acquire(int source, uint32_t line);
  void restart_line(int source, uint32_t line, gfc::Word word);
  void publish(int rank, uint32_t line, gfc::Word word);
  uint64_t aborted_through();
  uint64_t now_ns() const { return 0; }
  void report(const gfc::Record&) {}

  // Bytes. A write fills the span with a token, a read demands it.
  void write_bytes(int owner, gfc::Span span, uint64_t token);
  void read_bytes(int owner, gfc::Span span, uint64_t token);

  // Host-like steps of a scenario.
  void abort_rank(int rank, uint64_t dispatch);
  void join(int num_ranks);    // waits for this many ranks to join
  void reset_arena(int rank);  // a new incarnation's fresh memory
  // Runs `part` and breaks it off before its n-th access, as a SIGKILL would; 0: lets it end.
  void run_until(int num_accesses, const std::function<void()>& part);
  void demand(bool holds, const char* what);

  // The bell of parking.h, for scenarios that check parking itself.
  class Bell {
   public:
    Bell(World& world, int rank, int owner) : world_(world), rank_(rank), owner_(owner) {}
    void ring();
    bool is_parked();
    void add_parked(int n);
    uint32_t heard();
    void sleep(uint32_t heard);
    void wake();
    int num_polls() const { return 0; }
    void relax(int) const {}

   private:
    World& world_;
    int rank_, owner_;
  };

  class Backoff {
   public:
    explicit Backoff(Memory& mem);

   private:
    friend class Memory;
    Bell bell_;
    gfc::Backoff<Bell> parking_;
  };
  bool pause(Backoff& backoff);
  // After a wait whose caller does not care which word ended it: what was read makes no state.
  void forget_polls();
  Bell bell_of(int owner) { return Bell(world_, rank_, owner); }

  int rank() const { return rank_; }

 private:
  World& world_;
  int rank_;
};

using Program = std::function<void(Memory&)>;

struct Scenario {
  gfc::Plan plan{48, 1, 0, 0};
  int num_ranks = 2;
  bool parks = false;       // wait with parking.h instead of the checker's own blocking
  bool heeds_abort = false;  // look at the abort word between polls
  // Only publications and the first load of each poll are choices. Accesses to bytes and restarts
  // of own lines run at once, and conflicts on them are found by happens-before, which does not
  // depend on when they run; the second line of an entry is read with the first one (cases of two
  // ranks, which are not eager, interleave that). Orders of magnitude fewer states.
  bool is_eager = false;
  Program program;  // runs on each rank; programs tell ranks apart by mem.rank()
  int num_hosts = 0;
  Program host;
};

Result explore(const Scenario& scenario, uint64_t max_states = 20'000'000);

}  // namespace check
