// The group-free collectives as kernels.
//
// All but the transfers run on the rank's task stream, or in its order (context.h). A block of any
// of them may wait for peers, after it has done all that peers wait for; so all blocks of a launch
// must be resident at once, which the launcher keeps (at most one block per SM and kernel).
//
// Order of the bytes: threads write to a peer's arena (weak, or bulk copies that have completed);
// block barrier; thread 0 adds to the message's count of blocks (acquire-release, device scope);
// the last one stores the signal (release, system scope). The receiver's thread reads the signal
// (acquire, system scope); a block barrier or the end of the kernel passes it on.
#include "copy.cuh"

namespace gfc {

// One instance of a collective, as a block finds it at its start, in shared memory.
struct Present {
  Task task;
  Peers peers;

  __device__ uint64_t number() const { return task.instances[peers.kind]; }
  __device__ uint32_t tag() const { return make_tag(task.seed, peers.kind, number()); }
  __device__ uint64_t bank() const { return peers.bank_offset[number() % kNumBanks]; }
  // Earlier exchanges on the edge to a slot's rank: selects line, inbox and sequence.
  __device__ uint64_t count(int slot) const { return task.exchanges[peers.layout_slot[slot]]; }
  __device__ Word word(int slot) const {
    return Word{tag(), peers.first_sequence + static_cast<uint32_t>(count(slot)) + 1};
  }
  __device__ Wait wait(int slot, Word expected) const {
    return Wait{peers.own_rank, peers.rank[slot], kExchangeLine + expected.sequence % 2, expected,
                task.group.dispatch, task.timeout_ns};
  }
  __device__ char* result(const Move& move, int slot) const {
    return reinterpret_cast<char*>(peers.base[slot]) + bank() + move.result_offset[slot];
  }
  // Where a slot's part of this rank's result arrives.
  __device__ char* arrived(const Move& move, int slot) const {
    return reinterpret_cast<char*>(peers.inbox[slot]) + bank() + move.result_offset[peers.own];
  }
  // Where this rank's result is to be: the caller's tensor, or the arena.
  __device__ char* own_result(const Move& move) const {
    return move.output != 0 ? reinterpret_cast<char*>(move.output) : result(move, peers.own);
  }
};

constexpr int kTaskWords = sizeof(Task) / sizeof(uint64_t), kPeersWords = sizeof(Peers) / sizeof(uint64_t);
static_assert(kTaskWords <= 32 && kPeersWords <= 32);

// Reads the state with one load per thread, all at once; at least a warp. False: do nothing.
__device__ inline bool start(Context& context, uint32_t kind, Present& present) {
  const uint64_t* task = reinterpret_cast<const uint64_t*>(&context.task);
  const uint64_t* peers = reinterpret_cast<const uint64_t*>(&context.peers[kind]);
  const uint32_t lane = threadIdx.x;
  if (lane < 32) {
    uint64_t task_word = 0, peers_word = 0;
    if (lane < kTaskWords) task_word = __ldcg(task + lane);
    if (lane < kPeersWords) peers_word = __ldcg(peers + lane);
    if (lane < kTaskWords) reinterpret_cast<uint64_t*>(&present.task)[lane] = task_word;
    if (lane < kPeersWords) reinterpret_cast<uint64_t*>(&present.peers)[lane] = peers_word;
  }
  __syncthreads();
  if (present.task.failure.status != kOk) return false;
  if (present.task.has_entered != 0) return true;
  const int own = present.peers.own_rank;
  if (lane == 0) {
    leave(context, Record{kNotEntered, own, own, kExchangeLine, present.task.group.dispatch, 0, 0});
  }
  return false;
}

__device__ inline bool await_peer(Context& context, const Present& present, int slot) {
  CudaMemory mem(context);
  Record failure;
  if (await_word(mem, present.wait(slot, present.word(slot)), failure) == kOk) return true;
  leave(context, failure);
  return false;
}

// Counts this block as done with a message; the last one of them signals the receiver. One thread,
// after a barrier of the block.
__device__ inline void publish_part(Context& context, const Present& present, int slot,
                                    uint32_t num_blocks) {
  if (num_blocks > 1) {
    uint32_t& arrived = context.arrived[slot];
    if (add_acq_rel_gpu(&arrived, 1) + 1 != num_blocks) return;
    arrived = 0;
  }
  const Word word = present.word(slot);
  char* base = reinterpret_cast<char*>(present.peers.base[slot]);
  store_release_sys(base + line_offset(present.peers.own_rank, kExchangeLine + word.sequence % 2),
                    pack(word));
}

// The last block to come here advances the counts. Relaxed: every block has read them into its
// shared memory before, and the next kernel is ordered by the end of this one.
__device__ inline void finish(Context& context, const Present& present) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = gridDim.x == 1 || add_relaxed_gpu(&context.finished, 1) + 1 == gridDim.x;
    if (is_last) {
      context.finished = 0;
      context.task.instances[present.peers.kind] = present.number() + 1;
    }
  }
  __syncthreads();
  const int slot = threadIdx.x;
  if (is_last && slot < present.peers.size && slot != present.peers.own) {
    context.task.exchanges[present.peers.layout_slot[slot]] = present.count(slot) + 1;
  }
}

// One 8-byte unit of a message with flags, as two words {flag, data}.
__device__ inline void send_flagged(char* address, uint64_t flag, uint2 data) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(flag | data.x),
               "l"(flag | data.y) : "memory");
}

// Waits for one unit, and clears it: see gfc_flagged. False: the task is poisoned.
__device__ inline bool take_flagged(Context& context, const Present& present, int slot, char* address,
                                    uint64_t flag, uint2& data) {
  uint64_t low, high, started_ns = 0;
  for (uint32_t polls = 1;; ++polls) {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(low), "=l"(high) : "l"(address) : "memory");
    if (((low ^ flag) >> 32) == 0 && ((high ^ flag) >> 32) == 0) break;
    const bool is_strange = low >> 32 != 0 && ((low ^ flag) >> 32) != 0;
    if (!is_strange && polls % kPollsPerLook != 0) continue;
    CudaMemory mem(context);
    const Wait wait = present.wait(slot, unpack(flag));
    const Status status = is_strange             ? kProtocol
                          : is_poisoned(context) ? kAborted
                                                 : give_up(mem, wait, started_ns);
    if (status == kOk) continue;
    leave(context, Record{status, wait.rank, wait.peer, wait.line, wait.dispatch, flag, low});
    return false;
  }
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(address), "l"(0ull) : "memory");
  data = make_uint2(static_cast<uint32_t>(low), static_cast<uint32_t>(high));
  return true;
}

__device__ inline uint64_t flag_of(uint32_t tag) { return static_cast<uint64_t>(tag | 1) << 32; }

// Inboxes for messages with flags: this rank's in a peer's arena, and a peer's here.
__device__ inline char* flagged_outbox(const Present& present, int slot) {
  const uint64_t idx = present.peers.own_rank * kNumBanks + present.count(slot) % kNumBanks;
  return reinterpret_cast<char*>(present.peers.base[slot]) + present.peers.flagged + idx * kFlaggedBytes;
}
__device__ inline char* flagged_inbox(const Present& present, int slot) {
  const uint64_t idx = present.peers.rank[slot] * kNumBanks + present.count(slot) % kNumBanks;
  return reinterpret_cast<char*>(present.peers.inbox[slot]) + present.peers.flagged + idx * kFlaggedBytes;
}

// Where an 8-byte unit of a box lies on both sides.
__device__ inline Place unit_place(const Box& box, uint32_t unit) {
  const uint32_t row_units = static_cast<uint32_t>(box.row_bytes / 8);
  const uint32_t row = box.num_dims == 0 ? 0 : unit / row_units;
  Place place = locate(box, row);
  place.source += static_cast<uint64_t>(unit - row * row_units) * 8;
  place.target += static_cast<uint64_t>(unit - row * row_units) * 8;
  return place;
}

__device__ inline void build_peers(Context& context, uint32_t kind) {
  const Descriptor& group = context.task.group;
  Peers peers{};
  peers.kind = canonical(group, kind);
  const Subgroup subgroup = subgroup_of(group, peers.kind);
  const Region region = region_of(group, peers.kind);
  peers.size = subgroup.size;
  peers.own = subgroup.own;
  peers.first_sequence = context.plan.first_sequence;
  peers.own_rank = context.rank;
  peers.flagged = flagged_offset(context.plan, 0, 0);
  for (int bank = 0; bank < kNumBanks && region.count != 0; ++bank) {
    peers.bank_offset[bank] = exchange_inbox(context.plan, region, 1, bank, 0).offset;
  }
  for (int slot = 0; slot < subgroup.size; ++slot) {
    peers.layout_slot[slot] = subgroup.layout_slot(slot);
    peers.rank[slot] = group.rank[subgroup.layout_slot(slot)];
    peers.base[slot] = context.base[peers.rank[slot]];
    peers.inbox[slot] = context.inbox[peers.rank[slot]];
  }
  context.peers[kind] = peers;
}

// The parallel form of protocol.h's `enter`: a thread for each peer.
__device__ inline void enter_with(Context& context, int slot) {
  const Descriptor& group = context.task.group;
  CudaMemory mem(context);
  const int rank = group.rank[slot];
  const Word fresh{0, context.plan.first_sequence};
  mem.restart_line(rank, kExchangeLine, fresh);
  mem.restart_line(rank, kExchangeLine + 1, fresh);
  const Word entry{make_tag(context.task.seed, kEntryPurpose, 0), static_cast<uint32_t>(group.dispatch)};
  mem.publish(rank, static_cast<uint32_t>(kEntryLine + context.edges.entries[rank]++ % 2), entry);
  const Wait wait{context.rank, rank, kEntryLine, entry, group.dispatch, 0};
  Record failure;
  if (await_entry(mem, wait, failure) != kOk) leave(context, failure);
}

}  // namespace gfc

using namespace gfc;

// Sizes that the host mirrors: Context, Move, Exchange, Chunk.
extern "C" __device__ uint32_t gfc_sizes[4] = {sizeof(Context), sizeof(Move), sizeof(Exchange), sizeof(Chunk)};

// Binds the context to a group and runs the dispatch's entry barrier. Grid 1, block 32.
// On return the task has begun, or is poisoned.
extern "C" __global__ void __launch_bounds__(32)
gfc_enter(uint64_t address, const __grid_constant__ Descriptor group, uint64_t timeout_ns) {
  Context& context = *reinterpret_cast<Context*>(address);
  const int thread = threadIdx.x;
  if (thread == 0) {
    context.task = begin_task(group, timeout_ns);
    context.finished = context.poison_lock = 0;
  }
  if (thread < kMaxRanks) context.arrived[thread] = 0;
  __syncwarp();
  if (thread < kNumKinds) build_peers(context, thread);
  if (thread < group.num_ranks && thread != group.slot) enter_with(context, thread);
  __syncwarp();
  if (thread == 0 && !is_poisoned(context)) context.task.has_entered = 1;
}

// An exchange whose data carry their flags: each 64-bit word is {flag, data}. No fence, no signal.
// Block 512; num_slices warps for each of size * max(moves, 1) messages, and a grid that holds
// them. Needs units of 8 bytes (or no moves: a barrier), and messages of at most kFlaggedBytes / 2.
//
// The receiver clears each word that it has read, so an inbox holds nothing but zeros and words of
// the exchange that is under way; after a fault the host clears it before the next entry with that
// peer, which comes before the peer's next word. Bank = parity of the edge's
// count: a peer writes here again two exchanges later, after it has read our next message, which
// our next kernel sends, when this one is over.
extern "C" __global__ void __launch_bounds__(512) gfc_flagged(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  __shared__ Present present;
  __shared__ Box outgoing[kMaxRanks * kMaxMoves], incoming[kMaxRanks * kMaxMoves];
  if (!start(context, exchange.kind, present)) return;
  const int size = present.peers.size, own = present.peers.own;
  const int num_moves = exchange.num_moves, num_columns = max(num_moves, 1);
  const int thread = threadIdx.x;
  if (thread < 2 * size * num_moves) {
    const bool is_incoming = thread >= size * num_moves;
    const int item = is_incoming ? thread - size * num_moves : thread;
    const int step = item / num_moves;
    const Move& move = exchange.moves[item % num_moves];
    if (is_incoming) {
      incoming[item] = as_result(box_of(move, size, (own + size - step) % size, own));
    } else {
      outgoing[item] = box_of(move, size, own, (own + step) % size);
    }
  }
  __syncthreads();
  const uint32_t warp = (blockIdx.x * blockDim.x + thread) / 32;
  const int item = warp / exchange.num_slices;
  if (item < size * num_columns) {
    const uint32_t first = warp % exchange.num_slices * 32 + thread % 32, stride = exchange.num_slices * 32;
    const int step = item / num_columns, idx = item % num_columns;
    const int target = (own + step) % size, source = (own + size - step) % size;
    const Move& move = exchange.moves[idx];
    const char* input = reinterpret_cast<const char*>(move.input);
    char* result = num_moves == 0 ? nullptr : present.own_result(move);
    const Box* out = outgoing + step * num_moves;
    const Box* in = incoming + step * num_moves;
    if (step == 0) {
      if (num_moves != 0) copy_box(input, result, out[idx], 8, first, stride);
    } else {
      uint64_t sent_before = 0, sent = 0, due_before = 0, due = 0;
      for (int i = 0; i < num_moves; ++i) {
        if (i == idx) sent_before = sent, due_before = due;
        sent += bytes_of(out[i]) / 8;
        due += bytes_of(in[i]) / 8;
      }
      const uint64_t flag = flag_of(present.tag());
      char* outbox = flagged_outbox(present, target) + 16 * sent_before;
      char* inbox = flagged_inbox(present, source) + 16 * due_before;
      const uint32_t num_sent = num_moves == 0 ? 0 : static_cast<uint32_t>(bytes_of(out[idx]) / 8);
      for (uint32_t unit = first; unit < num_sent; unit += stride) {
        const char* address = input + unit_place(out[idx], unit).source;
        send_flagged(outbox + 16ull * unit, flag, *reinterpret_cast<const uint2*>(address));
      }
      // A message without bytes is one unit: the receiver still waits for it.
      if (sent == 0 && idx == 0 && first == 0) send_flagged(outbox, flag, make_uint2(0, 0));
      const uint32_t num_units = num_moves == 0 ? 0 : static_cast<uint32_t>(bytes_of(in[idx]) / 8);
      const uint32_t num_due = due == 0 && idx == 0 ? 1 : num_units;
      for (uint32_t unit = first; unit < num_due; unit += stride) {
        uint2 data;
        if (!take_flagged(context, present, source, inbox + 16ull * unit, flag, data)) break;
        if (unit < num_units) {
          *reinterpret_cast<uint2*>(result + unit_place(in[idx], unit).target) = data;
        }
      }
    }
  }
  finish(context, present);
}

// The same for one tensor whose every message is `dense_bytes` long and dense on both sides (the
// first dimension of contiguous tensors), or for none: a barrier. What small messages cost is
// latency, and working out boxes is a fifth of it.
extern "C" __global__ void __launch_bounds__(512)
gfc_flagged_dense(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  __shared__ Present present;
  if (!start(context, exchange.kind, present)) return;
  const int size = present.peers.size, own = present.peers.own;
  const uint32_t warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int step = warp / exchange.num_slices;
  if (step < size) {
    const uint32_t first = warp % exchange.num_slices * 32 + threadIdx.x % 32;
    const uint32_t stride = exchange.num_slices * 32;
    const Move& move = exchange.moves[0];
    const uint32_t num_units = static_cast<uint32_t>(exchange.dense_bytes / 8);
    const int target = (own + step) % size, source = (own + size - step) % size;
    const uint2* input = reinterpret_cast<const uint2*>(move.input) + (move.is_split ? target * num_units : 0);
    uint2* result = num_units == 0 ? nullptr
                                   : reinterpret_cast<uint2*>(present.own_result(move)) + source * num_units;
    if (step == 0) {
      for (uint32_t unit = first; unit < num_units; unit += stride) result[unit] = input[unit];
    } else {
      const uint64_t flag = flag_of(present.tag());
      char* outbox = flagged_outbox(present, target);
      char* inbox = flagged_inbox(present, source);
      for (uint32_t unit = first; unit < num_units; unit += stride) {
        send_flagged(outbox + 16ull * unit, flag, input[unit]);
      }
      if (num_units == 0 && first == 0) send_flagged(outbox, flag, make_uint2(0, 0));
      for (uint32_t unit = first; unit < max(num_units, 1u); unit += stride) {
        uint2 data;
        if (!take_flagged(context, present, source, inbox + 16ull * unit, flag, data)) break;
        if (num_units != 0) result[unit] = data;
      }
    }
  }
  finish(context, present);
}

namespace gfc {

// Copies by all threads of a block; the interface of BulkCopier.
struct ThreadCopier {
  uint32_t unit_bytes;
  __device__ void copy(const char* from, char* to, const Box& box, uint32_t slice, uint32_t num_slices) {
    copy_box(from, to, box, unit_bytes, slice * blockDim.x + threadIdx.x, num_slices * blockDim.x);
  }
  __device__ void before_reading() {}
};

struct Boxes {
  Box push, take;
  bool has_arrived;
};

// Copies what an earlier item has brought from the arena to the caller's tensor. Whole block.
template <class Copier>
__device__ inline bool take_item(const Exchange& exchange, Context& context, const Present& present,
                                 Copier& copier, Boxes& boxes, int item, uint32_t slice) {
  const Peers& peers = present.peers;
  const Move& move = exchange.moves[item % exchange.num_moves];
  const int source = (peers.own + peers.size - (item / exchange.num_moves + 1)) % peers.size;
  __syncthreads();
  if (threadIdx.x == 0) {
    boxes.has_arrived = await_peer(context, present, source);
    boxes.take = as_unpacked(box_of(move, peers.size, source, peers.own),
                             packed_offset(move, source, peers.own));
  }
  __syncthreads();
  if (!boxes.has_arrived) return false;
  copier.before_reading();
  copier.copy(present.arrived(move, source), reinterpret_cast<char*>(move.output), boxes.take, slice,
              exchange.num_slices);
  return true;
}

// A share of what stays on this rank. Whole block.
template <class Copier>
__device__ inline void keep(const Exchange& exchange, const Present& present, Copier& copier, Box& box,
                            uint32_t slice) {
  const Peers& peers = present.peers;
  for (int i = 0; i < exchange.num_moves; ++i) {
    const Move& move = exchange.moves[i];
    __syncthreads();
    if (threadIdx.x == 0) box = box_of(move, peers.size, peers.own, peers.own);
    __syncthreads();
    copier.copy(reinterpret_cast<const char*>(move.input), present.own_result(move), box, slice,
                exchange.num_keepers);
  }
}

// The body of gfc_exchange and gfc_bulk. An item is the message of one tensor to one rank, and
// num_slices blocks share it. The blocks in front of the keepers take all items at once, or, where
// num_slices is larger, some at a time, in turn from each rank's successor on.
//
// A rank is signalled when all of its items are pushed. So a block waits for a rank's items
// only after it has pushed all that its own rank sends in that turn: each turn's waits depend on
// pushes that depend on waits of earlier turns only, and no ring of ranks waits for itself.
template <class Copier>
__device__ inline void exchange_through_arena(const Exchange& exchange, Context& context,
                                              const Present& present, Copier& copier, Boxes& boxes) {
  const Peers& peers = present.peers;
  const uint32_t num_pushers = gridDim.x - exchange.num_keepers;
  if (blockIdx.x >= num_pushers) {
    keep(exchange, present, copier, boxes.push, blockIdx.x - num_pushers);
    finish(context, present);
    return;
  }
  const int num_moves = exchange.num_moves, num_items = (peers.size - 1) * num_moves;
  const int begin = blockIdx.x / exchange.num_slices, stride = num_pushers / exchange.num_slices;
  const uint32_t slice = blockIdx.x % exchange.num_slices;
  const bool is_taken = exchange.moves[0].output != 0;
  int next = begin;  // the first item that is not taken yet
  for (int item = begin; item < num_items; item += stride) {
    const Move& move = exchange.moves[item % num_moves];
    const int target = (peers.own + item / num_moves + 1) % peers.size;
    if (threadIdx.x == 0) {
      const Box box = box_of(move, peers.size, peers.own, target);
      boxes.push = is_taken ? as_packed(box, packed_offset(move, peers.own, target)) : box;
    }
    __syncthreads();
    copier.copy(reinterpret_cast<const char*>(move.input), present.result(move, target), boxes.push, slice,
                exchange.num_slices);
    __syncthreads();
    if (threadIdx.x == 0) publish_part(context, present, target, num_moves * exchange.num_slices);
    // Items of earlier turns have most likely come by now: other blocks keep the links busy.
    for (; is_taken && next / num_moves < item / num_moves; next += stride) {
      if (!take_item(exchange, context, present, copier, boxes, next, slice)) return;
    }
  }
  if (is_taken) {
    for (; next < num_items; next += stride) {
      if (!take_item(exchange, context, present, copier, boxes, next, slice)) return;
    }
  } else if (blockIdx.x == 0) {
    // One block waits, a thread for each peer; the end of the kernel passes it on.
    const int slot = threadIdx.x;
    if (slot < peers.size && slot != peers.own) await_peer(context, present, slot);
  }
  finish(context, present);
}

}  // namespace gfc

// An exchange by threads, straight into the result's place in each rank's arena.
// Grid num_slices * (1 to (size - 1) * moves) + num_keepers, block of 32 to 512. A result without an
// output of its own stays in the arena until this rank's next exchange of the kind.
extern "C" __global__ void __launch_bounds__(512) gfc_exchange(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  __shared__ Present present;
  __shared__ Boxes boxes;
  if (!start(context, exchange.kind, present)) return;
  ThreadCopier copier{exchange.unit_bytes};
  exchange_through_arena(exchange, context, present, copier, boxes);
}

#if __CUDA_ARCH__ >= 900
// The same by bulk copies through shared memory. Grid as above, block 32; shared memory of
// kStages * tile_bytes. Needs units of 16 bytes.
extern "C" __global__ void __launch_bounds__(32) gfc_bulk(const __grid_constant__ Exchange exchange) {
  extern __shared__ __align__(128) char tiles[];
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  __shared__ Present present;
  __shared__ Boxes boxes;
  __shared__ uint64_t barriers[kStages];
  if (!start(context, exchange.kind, present)) return;
  BulkCopier copier(tiles, barriers, exchange.tile_bytes);
  exchange_through_arena(exchange, context, present, copier, boxes);
}
#endif

namespace gfc {

// The messages of one direction, cut in slices of `slice_bytes` in the packed order of bytes, which is
// the same on both sides; at least one slice each. Built by all threads of a block, by item: a tensor and
// the rank `item / moves + 1` steps away.
struct Slices {
  Box boxes[kMaxRanks * kMaxMoves];
  uint64_t packed[kMaxRanks * kMaxMoves];  // where the message begins in the result's place
  uint32_t ends[kMaxRanks * kMaxMoves];    // slices of this item and those before it
  uint64_t bytes[kMaxRanks * kMaxMoves];   // of this item and those before it
  int count;

  __device__ void build(const Exchange& exchange, const Peers& peers, bool is_outgoing) {
    const int num_moves = max(exchange.num_moves, 1), size = peers.size, item = threadIdx.x;
    if (item == 0) count = (size - 1) * num_moves;
    if (item < (size - 1) * num_moves) {
      const int step = item / num_moves + 1;
      const int source = is_outgoing ? peers.own : (peers.own + size - step) % size;
      const int target = is_outgoing ? (peers.own + step) % size : peers.own;
      boxes[item] = Box{};
      packed[item] = 0;
      if (exchange.num_moves != 0) {
        const Move& move = exchange.moves[item % num_moves];
        boxes[item] = box_of(move, size, source, target);
        packed[item] = packed_offset(move, source, target);
      }
      bytes[item] = exchange.num_moves == 0 ? 0 : bytes_of(boxes[item]);
      const uint64_t tiles = (bytes[item] + exchange.tile_bytes - 1) / exchange.tile_bytes;
      ends[item] = max(1u, static_cast<uint32_t>(tiles));
    }
    __syncthreads();
    if (item == 0) {
      for (int i = 1; i < count; ++i) {
        ends[i] += ends[i - 1];
        bytes[i] += bytes[i - 1];
      }
    }
    __syncthreads();
  }
  // The item of a slice, and which of its rank's slices it is: the place of its word.
  __device__ int item_of(uint32_t slice) const {
    int item = 0;
    while (slice >= ends[item]) ++item;
    return item;
  }
  __device__ uint32_t begin_of(int item) const { return item == 0 ? 0 : ends[item - 1]; }
  // Of this slice and those before it.
  __device__ uint64_t bytes_through(uint32_t slice, int item, uint32_t slice_bytes) const {
    const uint64_t through = uint64_t{slice - begin_of(item) + 1} * slice_bytes;
    return min(bytes[item], through + (item == 0 ? 0 : bytes[item - 1]));
  }
  __device__ uint32_t total() const { return count == 0 ? 0 : ends[count - 1]; }
};

// Waits for the word of a slice, and clears it. One thread. False: the task is poisoned.
__device__ inline bool take_slice(Context& context, const Present& present, int slot, char* address,
                                  uint64_t flag) {
  CudaMemory mem(context);
  uint64_t started_ns = 0;
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t word = load_acquire_sys(address);
    if (word == flag) break;
    if (word == 0 && polls % kPollsPerHostLook != 0) continue;
    const Wait wait = present.wait(slot, unpack(flag));
    const Status status = word != 0              ? kProtocol
                          : is_poisoned(context) ? kAborted
                                                 : give_up(mem, wait, started_ns);
    if (status == kOk) continue;
    leave(context, Record{status, wait.rank, wait.peer, wait.line, wait.dispatch, flag, word});
    return false;
  }
  store_relaxed_sys(address, 0);
  return true;
}

}  // namespace gfc

// An exchange through arenas in host memory, which neither side reads or writes quickly: some blocks push
// slices while others take those that have come, so both directions of the link are busy. Grid num_slices
// pushers + num_keepers takers, block of 32 to 512; slices of tile_bytes, a multiple of 16, alike on all
// ranks. Every result has an output; without moves it is a barrier.
//
// The word of a slice lies in the inbox for messages with flags, where the next slice's is 8 bytes behind.
// What gfc_flagged says of these words holds here: cleared when read, banks by the parity of the edge's
// count, and nobody writes to a bank whose words have not been read. Pushers never wait, but for a link
// whose rate is limited: a slice is published when that link would have moved it and all before it.
extern "C" __global__ void __launch_bounds__(512) gfc_staged(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  __shared__ Present present;
  __shared__ Slices slices;
  __shared__ Box box;
  __shared__ bool has_arrived;
  if (!start(context, exchange.kind, present)) return;
  const Peers& peers = present.peers;
  const uint64_t began_ns = timer_ns();
  const int size = peers.size, num_moves = max(exchange.num_moves, 1);
  const bool is_pusher = blockIdx.x < exchange.num_slices;
  slices.build(exchange, peers, is_pusher);
  const uint32_t worker = is_pusher ? blockIdx.x : blockIdx.x - exchange.num_slices;
  const uint32_t num_workers = is_pusher ? exchange.num_slices : exchange.num_keepers;
  const uint64_t flag = flag_of(present.tag());
  if (!is_pusher) {
    ThreadCopier copier{exchange.unit_bytes};
    keep(exchange, present, copier, box, worker);
  }
  for (uint32_t slice = worker; slice < slices.total(); slice += num_workers) {
    const int item = slices.item_of(slice), step = item / num_moves + 1;
    const int slot = is_pusher ? (peers.own + step) % size : (peers.own + size - step) % size;
    const uint64_t word = 8ull * (slice - slices.begin_of((step - 1) * num_moves));
    const Move& move = exchange.moves[item % num_moves];
    const uint32_t units = exchange.tile_bytes / exchange.unit_bytes;
    const uint32_t first = (slice - slices.begin_of(item)) * units;
    __syncthreads();
    if (threadIdx.x == 0) {
      has_arrived = is_pusher || take_slice(context, present, slot, flagged_inbox(present, slot) + word, flag);
      const Box& whole = slices.boxes[item];
      box = is_pusher ? as_packed(whole, slices.packed[item]) : as_unpacked(whole, slices.packed[item]);
    }
    __syncthreads();
    if (!has_arrived) return;
    if (exchange.num_moves != 0) {
      const char* from = is_pusher ? reinterpret_cast<const char*>(move.input) : present.arrived(move, slot);
      char* to = is_pusher ? present.result(move, slot) : reinterpret_cast<char*>(move.output);
      copy_box(from, to, box, exchange.unit_bytes, first + threadIdx.x, blockDim.x, first + units);
    }
    __syncthreads();
    if (is_pusher && threadIdx.x == 0) {
      pace(context.link_mb_per_s, began_ns, slices.bytes_through(slice, item, exchange.tile_bytes));
      store_release_sys(flagged_outbox(present, slot) + word, flag);
    }
  }
  finish(context, present);
}

namespace gfc {

__device__ inline uint32_t transfer_tag(const Context& context, const Chunk& chunk, int source,
                                        int target, uint32_t purpose) {
  uint64_t seed = mix(mix(mix(0, chunk.dispatch), chunk.label), source * 256 + target);
  seed = mix(mix(seed, context.incarnation[source]), context.incarnation[target]);
  return make_tag(seed, purpose, chunk.chunk);
}

// Waits on a line of a transfer with the first thread; the block learns how it went.
__device__ inline bool await_transfer(Context& context, const Chunk& chunk, uint32_t line, Word word) {
  __shared__ bool has_come;
  if (threadIdx.x == 0) {
    CudaMemory mem(context);
    Record failure;
    has_come = await_word(mem, Wait{context.rank, chunk.peer, line, word, chunk.dispatch, chunk.timeout_ns},
                          failure) == kOk;
    if (!has_come && atomicExch(&context.edges.broken[chunk.peer], failure.status) == 0) {
      tell_host(context, failure);
    }
  }
  __syncthreads();
  return has_come;
}

__device__ inline void copy_dense(const char* from, char* to, uint64_t bytes) {
  const uint64_t low_bits = reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to) | bytes;
  Box box{};
  box.row_bytes = static_cast<int64_t>(bytes);
  box.num_rows = 1;
  const uint32_t unit = low_bits % 16 == 0 ? 16 : low_bits % 4 == 0 ? 4 : 1;
  copy_box(from, to, box, unit, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// One direction of an edge, as its context counts it.
__device__ inline bool is_broken(const Context& context, int peer) {
  return *reinterpret_cast<const volatile int32_t*>(&context.edges.broken[peer]) != 0;
}

}  // namespace gfc

// Sends one chunk: waits until its bank is free, pushes, signals; `steps` picks which of these, so
// that one block waits and many push. Any grid, any block; bytes at most post_bytes.
extern "C" __global__ void __launch_bounds__(512) gfc_send(const __grid_constant__ Chunk chunk) {
  Context& context = *reinterpret_cast<Context*>(chunk.context);
  const int peer = chunk.peer;
  const uint64_t count = context.edges.sent[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = context.plan.first_sequence + static_cast<uint32_t>(count) + 1;
  if (is_broken(context, peer)) return;
  const uint64_t began_ns = timer_ns();
  if ((chunk.steps & kAwait) != 0 && count >= kNumBanks) {
    const Word credit{context.edges.credit_tag[peer][bank], sequence - kNumBanks};
    if (!await_transfer(context, chunk, kCreditLine + bank, credit)) return;
  }
  if ((chunk.steps & kCopy) != 0) {
    copy_dense(reinterpret_cast<const char*>(chunk.address),
               reinterpret_cast<char*>(context.base[peer]) +
                   post_inbox(context.plan, context.rank, count).offset,
               chunk.bytes);
  }
  __syncthreads();
  if ((chunk.steps & kPublish) == 0 || threadIdx.x != 0) return;
  if (add_acq_rel_gpu(&context.sent_blocks[peer], 1) + 1 != gridDim.x) return;
  context.sent_blocks[peer] = 0;
  pace(chunk.link_mb_per_s, began_ns, chunk.bytes);
  const uint32_t tag = transfer_tag(context, chunk, context.rank, peer, kPostPurpose);
  CudaMemory(context).publish(peer, kPostLine + bank, Word{tag, sequence});
  context.edges.credit_tag[peer][bank] = transfer_tag(context, chunk, context.rank, peer, kCreditPurpose);
  context.edges.sent[peer] = count + 1;
}

// Receives one chunk: waits until it is there, and unless `steps` is that alone, copies it and gives
// its bank back. Any grid, any block.
extern "C" __global__ void __launch_bounds__(512) gfc_recv(const __grid_constant__ Chunk chunk) {
  Context& context = *reinterpret_cast<Context*>(chunk.context);
  const int peer = chunk.peer;
  const uint64_t count = context.edges.received[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = context.plan.first_sequence + static_cast<uint32_t>(count) + 1;
  if (is_broken(context, peer)) return;
  const Word post{transfer_tag(context, chunk, peer, context.rank, kPostPurpose), sequence};
  if (!await_transfer(context, chunk, kPostLine + bank, post)) return;
  if ((chunk.steps & kCopy) == 0) return;
  copy_dense(reinterpret_cast<const char*>(context.inbox[peer]) +
                 post_inbox(context.plan, peer, count).offset,
             reinterpret_cast<char*>(chunk.address), chunk.bytes);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (add_acq_rel_gpu(&context.received_blocks[peer], 1) + 1 != gridDim.x) return;
  context.received_blocks[peer] = 0;
  // Release: all blocks' reads are over before the sender sees the credit and writes again.
  const uint32_t tag = transfer_tag(context, chunk, peer, context.rank, kCreditPurpose);
  CudaMemory(context).publish(peer, kCreditLine + bank, Word{tag, sequence});
  context.edges.received[peer] = count + 1;
}

// Starts transfers with a peer anew after a fault. One thread; no transfer with this peer is under
// way, on either side. Exchanges with it may be: they start anew at each entry.
extern "C" __global__ void gfc_restart_edge(uint64_t address, int peer, uint32_t incarnation) {
  Context& context = *reinterpret_cast<Context*>(address);
  CudaMemory mem(context);
  restart_edge(mem, context.edges, peer);
  context.incarnation[peer] = incarnation;
  context.sent_blocks[peer] = context.received_blocks[peer] = 0;
}
