// Aborts and deaths at any moment, and waits that sleep.
#include "scenarios.h"

namespace check {
namespace {

using gfc::kWhole;

// A rank's part in a task that may be aborted under it.
void run_tolerantly(Memory& mem, gfc::Edges& edges, const TaskSpec& spec) {
  gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
  const gfc::Status entered = gfc::enter(mem, edges, task);
  mem.demand(entered == gfc::kOk || entered == gfc::kAborted, "entry failed otherwise");
  for (uint64_t i = 0; i < spec.kinds.size(); ++i) {
    Tokens payload(mem, (spec.dispatch << 24) | ((i + 1) << 8), task, spec.kinds[i]);
    const gfc::Status status = gfc::exchange(mem, task, spec.kinds[i], payload);
    mem.demand(status == gfc::kOk || status == gfc::kAborted, "exchange failed otherwise");
    if (entered != gfc::kOk) mem.demand(status == gfc::kAborted, "a poisoned task went on");
  }
}

// The host aborts dispatch 1 at any moment; when all have left it, dispatch 2 must work.
Scenario abort_at_any_time(int num_ranks, std::vector<uint32_t> kinds) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = true;
  scenario.heeds_abort = true;
  scenario.num_hosts = 1;
  Ranks all;
  for (int rank = 0; rank < num_ranks; ++rank) all.push_back(rank);
  scenario.program = [num_ranks, all, kinds](Memory& mem) {
    gfc::Edges edges{};
    run_tolerantly(mem, edges, {1, all, kinds});
    mem.join(num_ranks);
    real_tasks_with(mem, edges, {{2, all, kinds}});
  };
  scenario.host = [all](Memory& mem) {
    for (int rank : all) mem.abort_rank(rank, 1);
  };
  return scenario;
}

// The last rank dies before its n-th access to shared memory, inside dispatch 1. The host aborts
// the others (at any moment; before the death, too), waits for all to leave or be reaped, lets
// edges start anew, and brings in a new incarnation: dispatches 2 and 3 must work.
Scenario death_after(int num_ranks, int num_accesses) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = true;
  scenario.heeds_abort = true;
  scenario.num_hosts = 1;
  const std::vector<uint32_t> one{kWhole}, two{kWhole, kWhole};
  Ranks all, survivors;
  for (int rank = 0; rank < num_ranks; ++rank) all.push_back(rank);
  for (int rank = 0; rank + 1 < num_ranks; ++rank) survivors.push_back(rank);
  scenario.program = [=](Memory& mem) {
    gfc::Edges edges{};
    const bool dies = mem.rank() == num_ranks - 1;
    const TaskSpec first{1, all, num_ranks == 2 ? two : one};
    mem.run_until(dies ? num_accesses : 0, [&] { run_tolerantly(mem, edges, first); });
    mem.join(num_ranks);  // survivors have reported, the dead one is reaped
    if (dies) mem.reset_arena(mem.rank());
    if (dies) edges = gfc::Edges{};
    for (int peer : all) {
      if (peer != mem.rank()) gfc::restart_edge(mem, edges, peer);
    }
    mem.join(num_ranks);  // all have said so
    real_tasks_with(mem, edges, {{2, survivors, {kWhole}}, {3, all, {kWhole}}});
  };
  scenario.host = [all](Memory& mem) {
    for (int rank : all) mem.abort_rank(rank, 1);
  };
  return scenario;
}

Scenario parking(int num_ranks, std::vector<TaskSpec> tasks) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.parks = true;
  scenario.is_eager = num_ranks > 2;
  scenario.program = real_tasks(std::move(tasks));
  return scenario;
}

// A publisher that looks for sleepers before it rings: a waiter may fall asleep in between.
Scenario wake_before_ring() {
  Scenario scenario;
  scenario.program = [](Memory& mem) {
    const int peer = 1 - mem.rank();
    Memory::Bell bell = mem.bell_of(peer), own = mem.bell_of(mem.rank());
    mem.publish(peer, gfc::kExchangeLine, gfc::Word{1, 1});
    if (bell.is_parked()) bell.wake();
    bell.ring();
    gfc::Backoff<Memory::Bell> backoff(own);
    while (mem.load_acquire(peer, gfc::kExchangeLine).sequence != 1) backoff.pause();
  };
  return scenario;
}

}  // namespace

void add_fault_cases(std::vector<Case>& cases) {
  cases.push_back({"parked waits, two ranks", true, "",
                   parking(2, {{1, {0, 1}, {kWhole, kWhole}}})});
  cases.push_back({"parked waits, three ranks", true, "", parking(3, {{1, {0, 1, 2}, {}}})});
  cases.push_back({"looking for sleepers before ringing", false, "deadlock", wake_before_ring()});
  const std::vector<uint32_t> none, one{kWhole};
  cases.push_back({"abort at any time, two ranks", true, "", abort_at_any_time(2, one)});
  cases.push_back({"abort at the entry of three ranks", true, "", abort_at_any_time(3, none)});
  for (int num_accesses = 1; num_accesses <= 18; ++num_accesses) {
    cases.push_back({"death of one of two ranks", true, "", death_after(2, num_accesses)});
  }
  cases.push_back({"death of one of three ranks", true, "", death_after(3, 1)});
}

}  // namespace check
