#include "capi.h"

#include <sys/mman.h>

#include <new>

struct gfc_context {
  gfc_context(const gfc::Plan& plan, int rank) : mem(plan, rank) {}
  gfc::CpuMemory mem;
  gfc::Edges edges = {};
  uint32_t incarnation[gfc::kMaxRanks] = {};
  uint64_t last_dispatch = 0;  // that this rank entered, or tried to
};

namespace {

using gfc::Record;
using gfc::Status;

// A descriptor that names an incarnation whose arena is not mapped here would have us write to a
// dead rank's memory and wait for it. Returns the slot at fault, or -1.
int stale_slot(const gfc_context& context, const gfc::Descriptor& group) {
  for (int slot = 0; slot < group.num_ranks; ++slot) {
    const int rank = group.rank[slot];
    const bool is_mapped = context.mem.base(rank) != nullptr;
    if (!is_mapped || context.incarnation[rank] != group.incarnation[slot]) return slot;
  }
  return -1;
}

gfc::Transfer transfer_of(const gfc_context& context, int source, int target, uint64_t dispatch,
                          uint32_t label, uint64_t timeout_ns) {
  const int own = context.mem.rank();
  uint64_t seed = gfc::mix(gfc::mix(gfc::mix(0, dispatch), label), source * 256 + target);
  seed = gfc::mix(seed, context.incarnation[source]);
  seed = gfc::mix(seed, context.incarnation[target]);
  return {own, own == source ? target : source, dispatch, seed, timeout_ns};
}

// A point-to-point payload: chunks of one strided block.
struct Chunks {
  const gfc::CpuMemory& mem;
  const gfc::Block& block;
  uint64_t begin = 0, bytes = 0;

  void push(int rank, int, gfc::Span inbox) {
    gfc::pack(block, begin, bytes, mem.base(rank) + inbox.offset);
  }
  void collect(int, gfc::Span inbox) {
    gfc::unpack(mem.base(mem.rank()) + inbox.offset, begin, bytes, block);
  }
};

template <class MoveChunk>
Status for_chunks(gfc_context& context, const gfc::Transfer& transfer, const gfc::Block& block,
                  Record* failure, MoveChunk move) {
  const int peer = transfer.peer;
  const bool is_aborted = context.mem.aborted_through() >= transfer.dispatch;
  if (is_aborted || context.edges.broken[peer] != 0) {
    const Status status = is_aborted ? gfc::kAborted : gfc::kBrokenEdge;
    *failure = Record{status, transfer.rank, is_aborted ? transfer.rank : peer, gfc::kPostLine,
                      transfer.dispatch, 0, 0};
    context.mem.report(*failure);
    return status;
  }
  const uint64_t total = gfc::bytes_of(block), limit = context.mem.plan().post_bytes;
  Chunks chunks{context.mem, block};
  uint64_t chunk = 0;
  do {  // an empty message is one empty chunk: the receiver still waits for it
    chunks.begin = chunk * limit;
    chunks.bytes = total - chunks.begin < limit ? total - chunks.begin : limit;
    const Status status = move(chunks, chunk, *failure);
    if (status != gfc::kOk) {
      context.edges.broken[peer] = status;
      return status;
    }
  } while (++chunk * limit < total);
  return gfc::kOk;
}

}  // namespace

extern "C" {

void gfc_struct_bytes(uint64_t* bytes) {
  const uint64_t found[] = {sizeof(gfc::Plan), sizeof(gfc::Descriptor), sizeof(gfc::Record),
                            sizeof(gfc::Task), sizeof(gfc::Part),       sizeof(gfc::Block)};
  for (uint64_t size : found) *bytes++ = size;
}

uint64_t gfc_arena_bytes(const gfc::Plan* plan) { return gfc::arena_bytes(*plan); }
uint64_t gfc_plan_hash(const gfc::Plan* plan) { return gfc::plan_hash(*plan); }

char* gfc_arena_map(int fd, uint64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

void gfc_arena_unmap(char* base, uint64_t bytes) { munmap(base, bytes); }

void gfc_arena_format(char* base, const gfc::Plan* plan, int rank, uint32_t incarnation) {
  gfc::format_arena(base, *plan, rank, incarnation);
}

int gfc_arena_check(const char* base, const gfc::Plan* plan, int rank, uint32_t incarnation) {
  return gfc::check_arena(base, *plan, rank, incarnation) ? 1 : 0;
}

void gfc_arena_abort_through(char* base, uint64_t dispatch) { gfc::abort_through(base, dispatch); }

void gfc_arena_last_failure(const char* base, Record* record) { *record = gfc::last_failure(base); }

gfc_context* gfc_context_create(const gfc::Plan* plan, int rank) {
  return new (std::nothrow) gfc_context(*plan, rank);
}

void gfc_context_destroy(gfc_context* context) { delete context; }

void gfc_context_map(gfc_context* context, int rank, uint32_t incarnation, char* base) {
  const bool is_replaced = context->mem.base(rank) != nullptr;
  context->mem.map(rank, base);
  context->incarnation[rank] = incarnation;
  if (is_replaced && rank != context->mem.rank()) {
    gfc::restart_edge(context->mem, context->edges, rank);
  }
}

void gfc_context_restart_edge(gfc_context* context, int peer) {
  gfc::restart_edge(context->mem, context->edges, peer);
}

void gfc_task_begin(gfc::Task* task, const gfc::Descriptor* group, uint64_t timeout_ns) {
  *task = gfc::begin_task(*group, timeout_ns);
}

int gfc_enter(gfc_context* context, gfc::Task* task) {
  const gfc::Descriptor& group = task->group;
  const int own = context->mem.rank(), stale = stale_slot(*context, group);
  if (stale >= 0) {
    const int peer = group.rank[stale];
    task->failure = Record{gfc::kStaleMap, own, peer, gfc::kEntryLine, group.dispatch,
                           group.incarnation[stale], context->incarnation[peer]};
  } else if (group.dispatch <= context->last_dispatch) {
    task->failure = Record{gfc::kNotRising, own, own, gfc::kEntryLine, group.dispatch,
                           context->last_dispatch + 1, group.dispatch};
  } else {
    context->last_dispatch = group.dispatch;
    return gfc::enter(context->mem, context->edges, *task);
  }
  context->mem.report(task->failure);
  return task->failure.status;
}

int gfc_exchange(gfc_context* context, gfc::Task* task, uint32_t kind, const gfc::Part* parts,
                 int num_parts) {
  const uint32_t canonical = gfc::canonical(task->group, kind);
  const gfc::Subgroup subgroup = gfc::subgroup_of(task->group, canonical);
  gfc::Reshard payload(context->mem, parts, num_parts, subgroup);
  uint64_t round = 0, longest = 0, chunk = 1;
  if (subgroup.size > 1) {
    longest = payload.longest_message();
    const gfc::Region region = gfc::region_of(task->group, canonical);
    chunk = gfc::exchange_inbox(context->mem.plan(), region, subgroup.size, 0, 0).bytes;
  }
  do {  // at least one round: an exchange without bytes still orders its ranks
    payload.start_round(round);
    const Status status = gfc::exchange(context->mem, *task, canonical, payload);
    if (status != gfc::kOk) return status;
  } while (++round * chunk < longest);
  return gfc::kOk;
}

int gfc_send(gfc_context* context, int peer, uint64_t dispatch, uint32_t label,
             const gfc::Block* block, uint64_t timeout_ns, Record* failure) {
  const gfc::Transfer transfer =
      transfer_of(*context, context->mem.rank(), peer, dispatch, label, timeout_ns);
  return for_chunks(*context, transfer, *block, failure,
                    [&](Chunks& chunks, uint64_t chunk, Record& record) {
                      return gfc::send_chunk(context->mem, context->edges, transfer, chunk, chunks,
                                             record);
                    });
}

int gfc_recv(gfc_context* context, int peer, uint64_t dispatch, uint32_t label,
             const gfc::Block* block, uint64_t timeout_ns, Record* failure) {
  const gfc::Transfer transfer =
      transfer_of(*context, peer, context->mem.rank(), dispatch, label, timeout_ns);
  return for_chunks(*context, transfer, *block, failure,
                    [&](Chunks& chunks, uint64_t chunk, Record& record) {
                      return gfc::recv_chunk(context->mem, context->edges, transfer, chunk, chunks,
                                             record);
                    });
}

}  // extern "C"
