// The protocol of group-free collectives, for any memory that ranks share.
//
// The same text runs over CPU arenas, with ranks as threads under ThreadSanitizer, under the
// model checker's schedules, and on CUDA. What it needs of a memory (one object per rank):
//
//   Word load_acquire(source, line)         a signal line of the own arena
//   void restart_line(source, line, word)   relaxed store to it, while its source cannot write
//   void publish(rank, line, word)          release store to the own line in a peer's arena, wake
//   uint64_t aborted_through()              the highest dispatch that the host has given up
//   uint64_t now_ns()
//   Backoff, bool pause(Backoff&)           between two polls; true: look at the clock and abort
//   void report(record)                     leave a record of a failure where the host sees it
//   const Plan& plan()
//
// Bytes move through a payload: push(rank, slot, span) writes to a peer's arena,
// collect(slot, span) reads the own one, keep() handles what stays on this rank.
//
// Why no byte is overwritten before it was read (the checker in tests/gfc exhausts this):
//   - `enter` waits for every rank of the layout, and a rank enters a task only after it has read
//     all that it collects in the one before. So no push of a task meets a read of another one.
//   - Inside a task the groups of one kind are fixed and disjoint, and each kind has two banks.
//     A rank pushes instance n after it has waited for all signals of n - 1; a peer signals n - 1
//     after it has read n - 2, which lay in the same bank.
//   - Point-to-point outlives tasks; the sender waits until the chunk that lay in the same bank
//     has been credited.
#pragma once

#include "plan.h"

namespace gfc {

enum Status : int32_t {
  kOk = 0,
  kTimedOut = 1,
  kAborted = 2,
  kProtocol = 3,    // a signal that does not belong to the exchange
  kStaleMap = 4,    // the descriptor names an incarnation that is not mapped here
  kNotEntered = 5,  // a collective before the entry barrier: bytes would not be safe
  kNotRising = 6,   // a dispatch number not above the last one entered
  kBrokenEdge = 7,  // an earlier transfer failed half-way and the edge was not restarted
};

// What a failed wait leaves behind.
struct Record {
  int32_t status;
  int32_t rank, peer;
  uint32_t line;
  uint64_t dispatch;
  uint64_t expected, seen;  // packed words
};

// A rank's run of one task. Lives in the rank's private memory.
struct Task {
  Descriptor group;
  uint64_t seed;
  uint64_t timeout_ns;               // bounds each wait inside the task
  uint64_t exchanges[kMaxRanks];     // on the edge to each slot, since the entry
  uint64_t instances[kNumKinds];     // of each kind, since the entry
  uint64_t has_entered;
  Record failure;                    // the first one; every later collective returns it at once
};

// Point-to-point state of the edges of one rank, by peer rank. Outlives tasks.
struct Edges {
  uint64_t entries[kMaxRanks];  // published to this peer; picks the line, needs no agreement
  uint64_t sent[kMaxRanks], received[kMaxRanks];
  uint32_t credit_tag[kMaxRanks][kNumBanks];
  int32_t broken[kMaxRanks];  // a transfer failed half-way: only a restart makes counts agree
};

enum Purpose : uint32_t { kEntryPurpose = 100, kPostPurpose = 101, kCreditPurpose = 102 };

GFC_FN Task begin_task(const Descriptor& group, uint64_t timeout_ns) {
  Task task{};
  task.group = group;
  task.seed = seed_of(group);
  task.timeout_ns = timeout_ns;
  return task;
}

// One wait: who waits, for which word, and until when (timeout_ns 0: until the host aborts).
struct Wait {
  int rank, peer;
  uint32_t line;
  Word expected;
  uint64_t dispatch, timeout_ns;
};

template <class Memory>
GFC_FN Status fail(Memory& mem, const Wait& wait, Status status, Word seen, Record& failure) {
  failure = Record{status,        wait.rank,           wait.peer, wait.line,
                   wait.dispatch, pack(wait.expected), pack(seen)};
  mem.report(failure);
  return status;
}

// Whether the wait must end although the signal has not come.
template <class Memory>
GFC_FN Status give_up(Memory& mem, const Wait& wait, uint64_t& started_ns) {
  if (mem.aborted_through() >= wait.dispatch) return kAborted;
  if (wait.timeout_ns == 0) return kOk;
  const uint64_t now = mem.now_ns();
  if (started_ns == 0) started_ns = now;
  return now - started_ns >= wait.timeout_ns ? kTimedOut : kOk;
}

// Waits until the line holds exactly the expected word. The acquire pairs with the peer's
// release in `publish`: what it wrote before is visible when this returns kOk.
template <class Memory>
GFC_FN Status await_word(Memory& mem, const Wait& wait, Record& failure) {
  uint64_t started_ns = 0;
  typename Memory::Backoff backoff(mem);
  for (;;) {
    const Word seen = mem.load_acquire(wait.peer, wait.line);
    const int32_t ahead = distance(seen.sequence, wait.expected.sequence);
    if (ahead == 0 && seen.tag == wait.expected.tag) return kOk;
    if (ahead >= 0) return fail(mem, wait, kProtocol, seen, failure);
    if (!mem.pause(backoff)) continue;
    const Status status = give_up(mem, wait, started_ns);
    if (status != kOk) return fail(mem, wait, status, seen, failure);
  }
}

// Waits until the peer has entered the dispatch. It may already be one entry further on this
// edge, on the other of the two lines; it cannot be two further, for that needs our next entry.
// A later dispatch without this one means that the peer left it out.
template <class Memory>
GFC_FN Status await_entry(Memory& mem, const Wait& wait, Record& failure) {
  uint64_t started_ns = 0;
  bool was_later = false;
  typename Memory::Backoff backoff(mem);
  for (;;) {
    bool is_later = false;
    Word seen{};
    for (uint32_t line = kEntryLine; line < kEntryLine + 2; ++line) {
      const Word word = mem.load_acquire(wait.peer, line);
      if (pack(word) == 0) continue;  // a fresh arena: the peer never entered anything here
      const int32_t ahead = distance(word.sequence, wait.expected.sequence);
      if (ahead == 0 && word.tag == wait.expected.tag) return kOk;
      if (ahead == 0) return fail(mem, wait, kProtocol, word, failure);
      if (ahead > 0) is_later = true;
      if (pack(seen) == 0 || distance(word.sequence, seen.sequence) > 0) seen = word;
    }
    // The peer's earlier entry became visible with its later one, so one more look must find it.
    if (was_later) return fail(mem, wait, kProtocol, seen, failure);
    was_later = is_later;
    if (is_later || !mem.pause(backoff)) continue;
    const Status status = give_up(mem, wait, started_ns);
    if (status != kOk) return fail(mem, wait, status, seen, failure);
  }
}

// The entry barrier of a task, once per dispatch and before its first collective. It waits until
// the host aborts it: a peer behind a long decode is not dead.
//
// Counts of exchanges start anew here, so a fault in an earlier task leaves nothing to repair.
// The receiver resets the lines in its own arena before it publishes its entry, and a peer pushes
// nothing before it has seen that entry; a peer still inside an aborted task would break this,
// so the host starts no task on a rank of an aborted layout before all of them have left it.
template <class Memory>
GFC_FN Status enter(Memory& mem, Edges& edges, Task& task) {
  const Descriptor& group = task.group;
  const int own = group.rank[group.slot];
  const uint32_t base = mem.plan().first_sequence;
  const Word entry{make_tag(task.seed, kEntryPurpose, 0), static_cast<uint32_t>(group.dispatch)};
  for (int slot = 0; slot < group.num_ranks; ++slot) {
    if (slot == group.slot) continue;
    mem.restart_line(group.rank[slot], kExchangeLine, Word{0, base});
    mem.restart_line(group.rank[slot], kExchangeLine + 1, Word{0, base});
  }
  for (int slot = 0; slot < group.num_ranks; ++slot) {
    if (slot == group.slot) continue;
    const int rank = group.rank[slot];
    mem.publish(rank, static_cast<uint32_t>(kEntryLine + edges.entries[rank]++ % 2), entry);
  }
  for (int slot = 0; slot < group.num_ranks; ++slot) {
    if (slot == group.slot) continue;
    const Wait wait{own, group.rank[slot], kEntryLine, entry, group.dispatch, 0};
    const Status status = await_entry(mem, wait, task.failure);
    if (status != kOk) return status;
  }
  task.has_entered = 1;
  return kOk;
}

// What one instance of a collective needs to know, equal on all ranks but for `subgroup.own`.
struct Instance {
  Subgroup subgroup;
  Region region;
  uint64_t number;
  uint32_t tag;
};

GFC_FN Instance next_instance(Task& task, uint32_t kind) {
  kind = canonical(task.group, kind);
  const uint64_t number = task.instances[kind]++;
  return {subgroup_of(task.group, kind), region_of(task.group, kind), number,
          make_tag(task.seed, kind, number)};
}

// Pushes to the rank in one slot, then signals it. The release in `publish` orders the bytes before it.
template <class Memory, class Payload>
GFC_FN void push(Memory& mem, Task& task, const Instance& instance, int slot, Payload& payload) {
  const Subgroup& subgroup = instance.subgroup;
  const int layout_slot = subgroup.layout_slot(slot), rank = task.group.rank[layout_slot];
  payload.push(rank, slot, exchange_inbox(mem.plan(), instance.region, subgroup.size,
                                          instance.number, subgroup.own));
  const uint32_t sequence =
      mem.plan().first_sequence + static_cast<uint32_t>(++task.exchanges[layout_slot]);
  mem.publish(rank, kExchangeLine + sequence % 2, Word{instance.tag, sequence});
}

// Waits for the push from one slot and reads it. The edge's count is the one that `push` advanced:
// both directions of an edge count the same exchanges.
template <class Memory, class Payload>
GFC_FN Status collect(Memory& mem, Task& task, const Instance& instance, int slot,
                      Payload& payload) {
  const Subgroup& subgroup = instance.subgroup;
  const int layout_slot = subgroup.layout_slot(slot);
  const uint32_t sequence =
      mem.plan().first_sequence + static_cast<uint32_t>(task.exchanges[layout_slot]);
  const Wait wait{task.group.rank[task.group.slot], task.group.rank[layout_slot],
                  kExchangeLine + sequence % 2,     Word{instance.tag, sequence},
                  task.group.dispatch,              task.timeout_ns};
  const Status status = await_word(mem, wait, task.failure);
  if (status != kOk) return status;
  payload.collect(slot, exchange_inbox(mem.plan(), instance.region, subgroup.size,
                                       instance.number, slot));
  return kOk;
}

// One exchange among the ranks of a kind: all group collectives are this. Every rank signals
// every other one and waits for it, also where it has no bytes for it: the signal is then the
// credit that lets the other one use the bank again.
template <class Memory, class Payload>
GFC_FN Status exchange(Memory& mem, Task& task, uint32_t kind, Payload& payload) {
  if (task.failure.status != kOk) return static_cast<Status>(task.failure.status);
  const int own = task.group.rank[task.group.slot];
  const Wait nobody{own, own, kExchangeLine, Word{}, task.group.dispatch, 0};
  if (task.has_entered == 0) return fail(mem, nobody, kNotEntered, Word{}, task.failure);
  if (mem.aborted_through() >= task.group.dispatch) {
    return fail(mem, nobody, kAborted, Word{}, task.failure);
  }
  const Instance instance = next_instance(task, kind);
  const Subgroup& subgroup = instance.subgroup;
  // Each rank starts with its successor, so that the pushes do not all meet at one receiver.
  for (int step = 1; step < subgroup.size; ++step) {
    push(mem, task, instance, (subgroup.own + step) % subgroup.size, payload);
  }
  payload.keep();
  for (int step = 1; step < subgroup.size; ++step) {
    const int slot = (subgroup.own + subgroup.size - step) % subgroup.size;
    const Status status = collect(mem, task, instance, slot, payload);
    if (status != kOk) return status;
  }
  return kOk;
}

// One direction of a point-to-point edge, for one transfer.
struct Transfer {
  int rank, peer;
  uint64_t dispatch;  // whose abort ends it
  uint64_t seed;      // equal on both sides: incarnations, ranks, dispatch, label
  uint64_t timeout_ns;
};

// Sends one chunk. Returns when the bytes lie in the peer's arena, before the peer has read them;
// waits only if both banks hold chunks that the peer has not credited yet.
template <class Memory, class Payload>
GFC_FN Status send_chunk(Memory& mem, Edges& edges, const Transfer& transfer, uint64_t chunk,
                         Payload& payload, Record& failure) {
  const int peer = transfer.peer;
  const uint64_t count = edges.sent[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = mem.plan().first_sequence + static_cast<uint32_t>(count) + 1;
  if (count >= kNumBanks) {
    const Word credit{edges.credit_tag[peer][bank], sequence - kNumBanks};
    const Wait wait{transfer.rank,     peer,               kCreditLine + bank, credit,
                    transfer.dispatch, transfer.timeout_ns};
    const Status status = await_word(mem, wait, failure);
    if (status != kOk) return status;
  }
  payload.push(peer, 0, post_inbox(mem.plan(), transfer.rank, count));
  mem.publish(peer, kPostLine + bank, Word{make_tag(transfer.seed, kPostPurpose, chunk), sequence});
  edges.credit_tag[peer][bank] = make_tag(transfer.seed, kCreditPurpose, chunk);
  edges.sent[peer] = count + 1;
  return kOk;
}

// Receives one chunk and gives its bank back to the sender.
template <class Memory, class Payload>
GFC_FN Status recv_chunk(Memory& mem, Edges& edges, const Transfer& transfer, uint64_t chunk,
                         Payload& payload, Record& failure) {
  const int peer = transfer.peer;
  const uint64_t count = edges.received[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = mem.plan().first_sequence + static_cast<uint32_t>(count) + 1;
  const Word post{make_tag(transfer.seed, kPostPurpose, chunk), sequence};
  const Wait wait{transfer.rank,     peer,               kPostLine + bank, post,
                  transfer.dispatch, transfer.timeout_ns};
  const Status status = await_word(mem, wait, failure);
  if (status != kOk) return status;
  payload.collect(0, post_inbox(mem.plan(), peer, count));
  // Release: our reads are over before the sender sees the credit and writes again.
  mem.publish(peer, kCreditLine + bank,
              Word{make_tag(transfer.seed, kCreditPurpose, chunk), sequence});
  edges.received[peer] = count + 1;
  return kOk;
}

// Starts point-to-point on an edge anew after a fault: own counts, and the lines that the peer
// writes here. Both ends do it after both have left the aborted task and before either is
// dispatched again; a survivor does it alone when it maps a peer's new incarnation, before that
// one is dispatched. Lines of exchanges start anew at every entry, and may be in use now.
template <class Memory>
GFC_FN void restart_edge(Memory& mem, Edges& edges, int peer) {
  const Word start{0, mem.plan().first_sequence};
  for (uint32_t line = kPostLine; line < kNumLines; ++line) mem.restart_line(peer, line, start);
  edges.sent[peer] = edges.received[peer] = 0;
  edges.broken[peer] = 0;
}

}  // namespace gfc
