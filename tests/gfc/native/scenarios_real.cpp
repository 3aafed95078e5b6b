// The protocol as it ships: every case here is safe, but for one use of it that must be avoided.
#include "scenarios.h"

namespace check {

int TaskSpec::slot_of(int rank) const {
  for (size_t slot = 0; slot < ranks.size(); ++slot) {
    if (ranks[slot] == rank) return static_cast<int>(slot);
  }
  return -1;
}

gfc::Descriptor describe(const TaskSpec& spec, int rank) {
  gfc::Descriptor group{};
  group.dispatch = spec.dispatch;
  group.num_ranks = static_cast<uint8_t>(spec.ranks.size());
  for (size_t slot = 0; slot < spec.ranks.size(); ++slot) {
    group.rank[slot] = static_cast<uint8_t>(spec.ranks[slot]);
    group.incarnation[slot] = 1;
  }
  group.slot = static_cast<uint8_t>(spec.slot_of(rank));
  group.cfg = static_cast<uint8_t>(spec.cfg);
  group.ring = static_cast<uint8_t>(spec.ring);
  group.torus = static_cast<uint8_t>(spec.torus);
  group.ulysses = static_cast<uint8_t>(spec.ranks.size() / spec.cfg / spec.ring / spec.torus);
  return group;
}

void real_tasks_with(Memory& mem, gfc::Edges& edges, const std::vector<TaskSpec>& tasks) {
  for (const TaskSpec& spec : tasks) {
    if (spec.slot_of(mem.rank()) < 0) continue;
    gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
    mem.demand(gfc::enter(mem, edges, task) == gfc::kOk, "entry failed");
    uint64_t ordinal[gfc::kNumKinds] = {};
    for (uint32_t kind : spec.kinds) {
      const uint64_t token = (spec.dispatch << 24) | (kind << 16) | (++ordinal[kind] << 8);
      Tokens payload(mem, token, task, kind);
      mem.demand(gfc::exchange(mem, task, kind, payload) == gfc::kOk, "exchange failed");
    }
  }
}

Program real_tasks(std::vector<TaskSpec> tasks) {
  return [tasks](Memory& mem) {
    gfc::Edges edges{};
    real_tasks_with(mem, edges, tasks);
  };
}

namespace {

using gfc::kPair, gfc::kRing, gfc::kTorus, gfc::kUlysses, gfc::kWhole;

Scenario tasks_on(int num_ranks, std::vector<TaskSpec> tasks) {
  Scenario scenario;
  scenario.num_ranks = num_ranks;
  scenario.is_eager = num_ranks > 3;
  scenario.program = real_tasks(std::move(tasks));
  return scenario;
}

// Results that stay in the arena (CUDA): an exchange signals and waits, and what it brought is read
// later. It may be read until the own next exchange of its kind begins, whatever other kinds do.
class Later {
 public:
  Later(Memory& mem, uint64_t token, const gfc::Task& task, uint32_t kind)
      : tokens_(mem, token, task, kind) {}
  void push(int rank, int slot, gfc::Span span) { tokens_.push(rank, slot, span); }
  void collect(int slot, gfc::Span span) { arrived_.push_back({slot, span}); }
  void keep() {}
  void read() {
    for (const Arrival& arrival : arrived_) tokens_.collect(arrival.slot, arrival.span);
  }

 private:
  struct Arrival {
    int slot;
    gfc::Span span;
  };
  Tokens tokens_;
  std::vector<Arrival> arrived_;
};

// Two attentions of one task, as in models/parallel/shared_attention.py: the heads' exchange, the ring's beside
// the attention to what the first one brought, then the way back. `num_chunks` 2: the heads of the
// next chunk are fetched before those of the present one are read in place.
Program attentions(int ring, int num_chunks) {
  return [ring, num_chunks](Memory& mem) {
    const TaskSpec spec = ring == 1 ? TaskSpec{1, {0, 1}, {}} : TaskSpec{1, {0, 1, 2, 3}, {}, 1, ring};
    gfc::Edges edges{};
    gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
    mem.demand(gfc::enter(mem, edges, task) == gfc::kOk, "entry failed");
    uint64_t number = 0;
    const auto exchange = [&](uint32_t kind) {
      Later payload(mem, ++number << 8, task, kind);
      mem.demand(gfc::exchange(mem, task, kind, payload) == gfc::kOk, "exchange failed");
      return payload;
    };
    for (int attention = 0; attention < 2; ++attention) {
      std::vector<Later> heads;
      for (int chunk = 0; chunk < num_chunks; ++chunk) heads.push_back(exchange(gfc::kUlysses));
      if (ring > 1) {
        Later keys = exchange(gfc::kRing);
        heads[0].read();
        keys.read();
      }
      for (Later& chunk : heads) chunk.read();
      exchange(gfc::kUlysses).read();
    }
  };
}

// Two attentions in a torus: queries, then keys, then the way back, each read before the next one begins
// (`is_fresh`), or in place: keys after the way back has begun.
Scenario tori(bool is_fresh) {
  Scenario scenario;
  scenario.program = [is_fresh](Memory& mem) {
    const TaskSpec spec{1, {0, 1}, {}, 1, 1, 2};
    gfc::Edges edges{};
    gfc::Task task = gfc::begin_task(describe(spec, mem.rank()), 0);
    mem.demand(gfc::enter(mem, edges, task) == gfc::kOk, "entry failed");
    uint64_t number = 0;
    for (int attention = 0; attention < 2; ++attention) {
      std::vector<Later> arrived;
      for (int part = 0; part < 3; ++part) {
        arrived.emplace_back(mem, ++number << 8, task, kTorus);
        mem.demand(gfc::exchange(mem, task, kTorus, arrived.back()) == gfc::kOk, "exchange failed");
        if (is_fresh) arrived.back().read();
      }
      if (!is_fresh) arrived[1].read();
    }
  };
  return scenario;
}

Scenario attentions_on(int ring, int num_chunks) {
  Scenario scenario;
  scenario.num_ranks = 2 * ring;
  scenario.is_eager = ring > 1;
  scenario.program = attentions(ring, num_chunks);
  return scenario;
}

// Rank 0 sends messages of several chunks to rank 1; with `is_two_way`, rank 1 to rank 0 as well.
Scenario posts(uint32_t first_sequence, bool is_two_way) {
  Scenario scenario;
  scenario.plan.first_sequence = first_sequence;
  scenario.program = [is_two_way](Memory& mem) {
    gfc::Edges edges{};
    const bool sends = is_two_way || mem.rank() == 0, receives = is_two_way || mem.rank() == 1;
    const int own = mem.rank(), peer = 1 - own;
    struct Chunk {
      Memory& mem;
      uint64_t token;
      void push(int rank, int, gfc::Span span) { mem.write_bytes(rank, span, token); }
      void collect(int, gfc::Span span) { mem.read_bytes(mem.rank(), span, token); }
    };
    gfc::Record failure{};
    const gfc::Transfer transfer{own, peer, 1, 77, 0};
    for (uint64_t chunk = 0; chunk < 5; ++chunk) {
      Chunk out{mem, chunk * 2 + own + 1}, in{mem, chunk * 2 + peer + 1};
      const auto send = [&] { return gfc::send_chunk(mem, edges, transfer, chunk, out, failure); };
      const auto recv = [&] { return gfc::recv_chunk(mem, edges, transfer, chunk, in, failure); };
      if (sends) mem.demand(send() == gfc::kOk, "send failed");
      if (receives) mem.demand(recv() == gfc::kOk, "receive failed");
    }
  };
  return scenario;
}

// Every script of three tasks over the groups of three ranks, each with one or two exchanges.
void add_all_mixes_of_three(std::vector<Case>& cases) {
  const std::vector<Ranks> groups = {{0, 1}, {1, 2}, {2, 0}, {0, 1, 2}, {2, 1, 0}};
  for (const Ranks& first : groups) {
    for (const Ranks& second : groups) {
      for (const Ranks& third : groups) {
        const std::vector<uint32_t> one{kWhole}, two{kWhole, kWhole};
        cases.push_back({"three overlapping groups of three ranks", true, "",
                         tasks_on(3, {{1, first, two}, {2, second, one}, {3, third, two}})});
        cases.back().scenario.is_eager = true;
      }
    }
  }
}

}  // namespace

void add_real_cases(std::vector<Case>& cases) {
  const std::vector<uint32_t> one{kWhole}, two{kWhole, kWhole}, three{kWhole, kWhole, kWhole};
  cases.push_back({"two ranks, one task, three exchanges", true, "", tasks_on(2, {{1, {0, 1}, three}})});
  cases.push_back({"two ranks, two tasks", true, "",
                   tasks_on(2, {{1, {0, 1}, two}, {2, {1, 0}, two}})});
  cases.push_back({"tasks without exchanges between entries", true, "",
                   tasks_on(2, {{1, {0, 1}, {}}, {2, {0, 1}, {}}, {3, {1, 0}, one}, {5, {0, 1}, one}})});
  cases.push_back({"three ranks, one exchange", true, "", tasks_on(3, {{1, {0, 1, 2}, one}})});
  cases.push_back({"overlapping pairs of three ranks", true, "",
                   tasks_on(3, {{1, {0, 1}, one}, {2, {1, 2}, one}, {3, {0, 2}, one}})});
  add_all_mixes_of_three(cases);
  cases.push_back({"four ranks after two pairs", true, "",
                   tasks_on(4, {{1, {0, 1}, one}, {2, {2, 3}, one}, {3, {0, 1, 2, 3}, one}})});
  cases.push_back({"four ranks, overlapping pairs and triples", true, "",
                   tasks_on(4, {{1, {0, 1, 2}, one}, {2, {2, 3}, two}, {3, {3, 0}, one}})});
  cases.push_back({"ulysses 2 x ring 2 in turn", true, "",
                   tasks_on(4, {{1, {0, 1, 2, 3}, {kUlysses, kRing, kUlysses, kRing}, 1, 2}})});
  cases.push_back({"cfg 2 x ulysses 2 in turn with the whole", true, "",
                   tasks_on(4, {{1, {0, 1, 2, 3}, {kUlysses, kPair, kUlysses, kWhole}, 2, 1}})});
  cases.push_back({"torus 2 x ulysses 2, an attention and the next", true, "",
                   tasks_on(4, {{1, {0, 1, 2, 3}, {kUlysses, kTorus, kTorus, kTorus, kUlysses, kUlysses}, 1, 1, 2}})});
  cases.push_back({"torus 2 x ring 2, an attention and the next", true, "",
                   tasks_on(4, {{1, {0, 1, 2, 3}, {kTorus, kRing, kTorus, kRing, kTorus, kTorus}, 1, 2, 2}})});
  cases.push_back({"cfg 2 x torus 2 in turn with the pair", true, "",
                   tasks_on(4, {{1, {0, 1, 2, 3}, {kTorus, kTorus, kTorus, kPair}, 2, 1, 2}})});
  cases.push_back({"torus 3", true, "", tasks_on(3, {{1, {0, 1, 2}, {kTorus, kTorus}, 1, 1, 3}})});
  cases.push_back({"fresh results in a torus", true, "", tori(true)});
  cases.push_back({"keys of a torus read in place", false, "bytes:", tori(false)});
  cases.push_back({"attention reads where its heads arrived", true, "", attentions_on(1, 1)});
  cases.push_back({"heads are read while keys arrive in the ring", true, "", attentions_on(2, 1)});
  cases.push_back({"chunks of heads read in place", false, "bytes:", attentions_on(1, 2)});
  for (uint32_t first_sequence : {0u, 0xfffffffeu, 0xffffffffu}) {
    cases.push_back({"point-to-point with credit", true, "", posts(first_sequence, false)});
    cases.push_back({"point-to-point with credit, both ways", true, "",
                     posts(first_sequence, true)});
  }
  Scenario wrapping = tasks_on(2, {{0xffffffff, {0, 1}, three}, {0x100000000, {0, 1}, three}});
  wrapping.plan.first_sequence = 0xfffffffe;
  cases.push_back({"counts and dispatch numbers that wrap", true, "", wrapping});
}

}  // namespace check
