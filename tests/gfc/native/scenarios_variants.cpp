// Other ways to move data, safe and broken, and mutants of the shipped one.
//
// Each broken variant is one that somebody might write; the checker has to reject it.
#include "scenarios.h"

namespace check {
namespace {

using gfc::Span;

uint64_t token_of(uint64_t instance, int source) { return (instance << 8) + source + 1; }

Span cells(Memory& mem, uint64_t first, uint64_t count = 1) {
  return {gfc::data_offset(mem.plan()) + first, count};
}

void signal(Memory& mem, int peer, uint32_t line, uint32_t count) {
  mem.publish(peer, line, gfc::Word{1, count});
}

// Waits for a count, or a later one: variants with several chunks in flight overwrite signals.
void await_count(Memory& mem, int peer, uint32_t line, uint32_t count) {
  Memory::Backoff backoff(mem);
  while (gfc::distance(mem.load_acquire(peer, line).sequence, count) < 0) mem.pause(backoff);
  mem.forget_polls();
}

bool contains(const Ranks& group, int rank) {
  for (int other : group) {
    if (other == rank) return true;
  }
  return false;
}

// Signals all peers of the group and waits for all; counts are per edge and never start anew.
struct EdgeCounts {
  uint32_t count[gfc::kMaxRanks] = {};
  void barrier(Memory& mem, const Ranks& group) {
    for (int peer : group) {
      if (peer != mem.rank()) signal(mem, peer, gfc::kExchangeLine, ++count[peer]);
    }
    for (int peer : group) {
      if (peer != mem.rank()) await_count(mem, peer, gfc::kExchangeLine, count[peer]);
    }
  }
};

// Push into an inbox per source; the bank follows from the edge's count. No entry barrier.
Scenario inbox_per_source(int num_ranks, std::vector<Ranks> groups, int num_banks) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = num_ranks > 2;
  scenario.program = [groups, num_banks](Memory& mem) {
    uint32_t count[gfc::kMaxRanks] = {};
    const int own = mem.rank();
    for (size_t i = 0; i < groups.size(); ++i) {
      if (!contains(groups[i], own)) continue;
      for (int peer : groups[i]) {
        if (peer == own) continue;
        const uint32_t bank = ++count[peer] % num_banks;
        mem.write_bytes(peer, cells(mem, own * num_banks + bank), token_of(i, own));
        signal(mem, peer, gfc::kExchangeLine, count[peer]);
      }
      for (int peer : groups[i]) {
        if (peer == own) continue;
        await_count(mem, peer, gfc::kExchangeLine, count[peer]);
        const uint32_t bank = count[peer] % num_banks;
        mem.read_bytes(own, cells(mem, peer * num_banks + bank), token_of(i, peer));
      }
    }
  };
  return scenario;
}

// Everyone stages at home, then reads from the others.
Scenario pull(int num_ranks, std::vector<Ranks> groups, int num_banks, bool has_exit_barrier) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = num_ranks > 2;
  scenario.program = [groups, num_banks, has_exit_barrier](Memory& mem) {
    EdgeCounts edges;
    std::vector<uint32_t> staged(gfc::kMaxRanks);  // of every rank: all follow the whole script
    const int own = mem.rank();
    for (size_t i = 0; i < groups.size(); ++i) {
      for (int rank : groups[i]) ++staged[rank];
      if (!contains(groups[i], own)) continue;
      mem.write_bytes(own, cells(mem, staged[own] % num_banks), token_of(i, own));
      edges.barrier(mem, groups[i]);
      for (int peer : groups[i]) {
        if (peer == own) continue;
        mem.read_bytes(peer, cells(mem, staged[peer] % num_banks), token_of(i, peer));
      }
      if (has_exit_barrier) edges.barrier(mem, groups[i]);
    }
  };
  return scenario;
}

// The shipped exchange, but each rank decides by itself whether a task needs an entry barrier.
Scenario entry_decided_by(std::vector<TaskSpec> tasks, bool (*is_needed)(const Ranks&, const Ranks&)) {
  Scenario scenario;
  scenario.num_ranks = 3;
  scenario.is_eager = true;
  scenario.program = [tasks, is_needed](Memory& mem) {
    gfc::Edges edges{};
    Ranks last;
    uint64_t exchanges[gfc::kMaxRanks] = {};  // by rank: they go on where no entry resets them
    for (const TaskSpec& spec : tasks) {
      if (spec.slot_of(mem.rank()) < 0) continue;
      gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
      if (is_needed(last, spec.ranks)) {
        mem.demand(gfc::enter(mem, edges, task) == gfc::kOk, "entry failed");
        for (int rank : spec.ranks) exchanges[rank] = 0;
      }
      task.has_entered = 1;
      last = spec.ranks;
      for (size_t slot = 0; slot < spec.ranks.size(); ++slot) {
        task.exchanges[slot] = exchanges[spec.ranks[slot]];
      }
      for (size_t i = 0; i < spec.kinds.size(); ++i) {
        Tokens payload(mem, (spec.dispatch << 24) | ((i + 1) << 8), task, spec.kinds[i]);
        const bool is_ok = gfc::exchange(mem, task, spec.kinds[i], payload) == gfc::kOk;
        mem.demand(is_ok, "exchange failed");
      }
      for (size_t slot = 0; slot < spec.ranks.size(); ++slot) {
        exchanges[spec.ranks[slot]] = task.exchanges[slot];
      }
    }
  };
  return scenario;
}

// Rank 0 sends chunks to all others through two banks; they acknowledge or do not.
Scenario one_way(int num_ranks, bool has_credit) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = num_ranks > 2;
  scenario.program = [num_ranks, has_credit](Memory& mem) {
    for (uint32_t chunk = 1; chunk <= 4; ++chunk) {
      for (int peer = 1; peer < num_ranks && mem.rank() == 0; ++peer) {
        if (has_credit && chunk > 2) await_count(mem, peer, gfc::kCreditLine, chunk - 2);
        mem.write_bytes(peer, cells(mem, chunk % 2), token_of(chunk, 0));
        signal(mem, peer, gfc::kPostLine, chunk);
      }
      if (mem.rank() == 0) continue;
      await_count(mem, 0, gfc::kPostLine, chunk);
      mem.read_bytes(mem.rank(), cells(mem, chunk % 2), token_of(chunk, 0));
      if (has_credit) signal(mem, 0, gfc::kCreditLine, chunk);
    }
  };
  return scenario;
}

// Two ranks exchange chunks and push ahead: chunk c is pushed before chunk c - lead + 1 is read.
// With `waits_first` it is pushed after the wait for that chunk, otherwise before it.
Scenario chunks_in_flight(int num_banks, int lead, bool waits_first) {
  Scenario scenario;
  scenario.program = [num_banks, lead, waits_first](Memory& mem) {
    const int own = mem.rank(), peer = 1 - own, num_chunks = 7;
    const auto push = [&](int chunk) {
      if (chunk >= num_chunks) return;
      mem.write_bytes(peer, cells(mem, chunk % num_banks), token_of(chunk, own));
      signal(mem, peer, gfc::kExchangeLine, chunk + 1);
    };
    for (int chunk = 0; chunk < lead - 1; ++chunk) push(chunk);
    for (int chunk = 0; chunk < num_chunks; ++chunk) {
      if (!waits_first) push(chunk + lead - 1);
      await_count(mem, peer, gfc::kExchangeLine, chunk + 1);
      if (waits_first) push(chunk + lead - 1);
      mem.read_bytes(own, cells(mem, chunk % num_banks), token_of(chunk, peer));
    }
  };
  return scenario;
}

// Ulysses and ring groups in turn, but with one pair of banks for both.
Scenario kinds_share_banks() {
  Scenario scenario;
  scenario.num_ranks = 4;
  scenario.is_eager = true;
  scenario.program = [](Memory& mem) {
    const TaskSpec spec{1, {0, 1, 2, 3}, {}, 1, 2};
    gfc::Edges edges{};
    gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
    gfc::enter(mem, edges, task);
    uint64_t number = 0;
    for (uint32_t kind : {gfc::kUlysses, gfc::kRing, gfc::kUlysses, gfc::kRing}) {
      gfc::Instance instance = gfc::next_instance(task, kind);
      instance.region = {0, 1};
      instance.number = number++;
      Tokens payload(mem, number << 8, task, kind);
      const int other = 1 - instance.subgroup.own;
      gfc::push(mem, task, instance, other, payload);
      gfc::collect(mem, task, instance, other, payload);
    }
  };
  return scenario;
}

Scenario signal_before_bytes() {
  Scenario scenario;
  scenario.program = [](Memory& mem) {
    const int own = mem.rank(), peer = 1 - own;
    signal(mem, peer, gfc::kExchangeLine, 1);
    mem.write_bytes(peer, cells(mem, 0), token_of(1, own));
    await_count(mem, peer, gfc::kExchangeLine, 1);
    mem.read_bytes(own, cells(mem, 0), token_of(1, peer));
  };
  return scenario;
}

// Exchanges through host memory (gfc_staged): two slices each, every slice with a word that its reader clears.
// A rank pushes both before it takes any, or takes each as soon as its own is pushed. `num_sets` of words and
// bytes, in turn.
Scenario slices(int num_sets, bool is_interleaved) {
  Scenario scenario;
  scenario.program = [num_sets, is_interleaved](Memory& mem) {
    const int own = mem.rank(), peer = 1 - own;
    const auto line = [&](int set, int slice) { return static_cast<uint32_t>(gfc::kPostLine + 2 * set + slice); };
    const auto place = [&](int set, int slice, int source) {
      return cells(mem, static_cast<uint64_t>(8 * set + 2 * slice + source));
    };
    const auto push = [&](uint32_t n, int slice) {
      const int set = static_cast<int>(n) % num_sets;
      mem.write_bytes(peer, place(set, slice, own), token_of(2 * n + slice, own));
      signal(mem, peer, line(set, slice), n);
    };
    const auto take = [&](uint32_t n, int slice) {
      const int set = static_cast<int>(n) % num_sets;
      await_count(mem, peer, line(set, slice), n);
      mem.restart_line(peer, line(set, slice), gfc::Word{0, 0});
      mem.read_bytes(own, place(set, slice, peer), token_of(2 * n + slice, peer));
    };
    for (uint32_t n = 1; n <= 4; ++n) {
      push(n, 0);
      if (is_interleaved) take(n, 0);
      push(n, 1);
      if (!is_interleaved) take(n, 0);
      take(n, 1);
    }
  };
  return scenario;
}

// Orders that agree on every pair of ranks, and still wait in a ring.
Scenario orders_that_agree_by_pairs_only() {
  Scenario scenario;
  scenario.num_ranks = 3;
  scenario.program = [](Memory& mem) {
    const TaskSpec a{1, {0, 1}, {}}, b{2, {1, 2}, {}}, c{3, {0, 2}, {}};
    const std::vector<std::vector<TaskSpec>> orders = {{a, c}, {b, a}, {c, b}};
    real_tasks(orders[mem.rank()])(mem);
  };
  return scenario;
}

}  // namespace

void add_variant_cases(std::vector<Case>& cases) {
  const auto safe = [&](const char* name, Scenario scenario) {
    cases.push_back({name, true, "", std::move(scenario)});
  };
  const auto broken = [&](const char* name, const char* fault, Scenario scenario) {
    cases.push_back({name, false, fault, std::move(scenario)});
  };
  const std::vector<Ranks> repeated = {{0, 1}, {0, 1}, {0, 1}, {0, 1}};
  const std::vector<Ranks> overlapping = {{0, 1}, {1, 2}, {0, 2}, {0, 1, 2}, {0, 1}, {1, 2}};
  const std::vector<Ranks> of_four = {{0, 1}, {2, 3}, {1, 2}, {0, 3}, {0, 1, 2, 3}};
  const std::vector<Ranks> moving_on = {{0, 1}, {0, 2}, {0, 2}, {0, 1}};

  safe("inbox per source, two banks by edge count", inbox_per_source(2, repeated, 2));
  safe("inbox per source, overlapping groups", inbox_per_source(3, overlapping, 2));
  safe("inbox per source, four ranks", inbox_per_source(4, of_four, 2));
  broken("inbox per source with a single bank", "bytes:", inbox_per_source(2, repeated, 1));

  safe("pull with a barrier after the reads", pull(2, repeated, 1, true));
  safe("pull with exit barrier, overlapping groups", pull(3, overlapping, 1, true));
  safe("pull with exit barrier, four ranks", pull(4, of_four, 1, true));
  broken("pull without exit barrier", "bytes:", pull(2, repeated, 1, false));
  broken("pull without exit barrier, overlapping groups", "bytes:",
         pull(3, overlapping, 1, false));
  broken("pull from double-buffered staging without exit barrier", "bytes:",
         pull(3, moving_on, 2, false));

  const std::vector<uint32_t> one{gfc::kWhole}, two{gfc::kWhole, gfc::kWhole};
  const auto if_my_last_group_differs = [](const Ranks& last, const Ranks& now) { return last != now; };
  const auto never = [](const Ranks&, const Ranks&) { return false; };
  const auto always = [](const Ranks&, const Ranks&) { return true; };
  const std::vector<TaskSpec> there_and_back = {{1, {0, 1}, one}, {2, {1, 2}, one}, {3, {0, 1}, one}};
  const std::vector<TaskSpec> change_of_peer = {{1, {0, 1}, two}, {2, {2, 1}, two}};
  safe("entry barrier as the descriptor says", entry_decided_by(there_and_back, always));
  broken("entry barrier decided locally", "", entry_decided_by(there_and_back, if_my_last_group_differs));
  broken("shared banks without entry barrier", "bytes:", entry_decided_by(change_of_peer, never));

  safe("one-way with credit", one_way(2, true));
  safe("broadcast with acknowledgement", one_way(3, true));
  broken("one-way without credit", "bytes:", one_way(2, false));
  broken("broadcast without acknowledgement", "bytes:", one_way(3, false));

  safe("two chunks in flight on two banks", chunks_in_flight(2, 1, false));
  safe("three chunks in flight on three banks", chunks_in_flight(3, 2, true));
  safe("four chunks in flight on four banks", chunks_in_flight(4, 2, false));
  broken("three chunks in flight on two banks", "bytes:", chunks_in_flight(2, 2, true));
  broken("four chunks in flight on three banks", "bytes:", chunks_in_flight(3, 2, false));

  safe("slices with words that readers clear", slices(2, false));
  safe("slices that are taken while others are pushed", slices(2, true));
  broken("slices in a single bank", "", slices(1, false));

  broken("ulysses and ring groups share banks", "bytes:", kinds_share_banks());
  broken("signal before the bytes", "bytes:", signal_before_bytes());
  broken("orders that agree pair by pair only", "deadlock", orders_that_agree_by_pairs_only());
}

}  // namespace check
