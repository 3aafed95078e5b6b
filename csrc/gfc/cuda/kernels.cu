// The group-free collectives as kernels.
//
// All run on the rank's task stream, but for the transfers. A block of any of them may wait for
// peers, after it has done all that peers wait for; so all blocks of a launch must be resident at
// once, which the launcher keeps (grids of at most one block per SM and kernel).
//
// Order of the bytes: threads write to a peer's arena (weak, or bulk copies that have completed);
// block barrier; thread 0 adds to the message's count of blocks (acquire-release, device scope);
// the last one stores the signal (release, system scope). The receiver's thread reads the signal
// (acquire, system scope); a block barrier or the end of the kernel passes it on.
#include "copy.cuh"

namespace gfc {

// One instance of a collective, as every block finds it at its start.
struct Present {
  int size, own;
  uint64_t number;
  uint32_t tag;
  uint64_t bank;  // offset in every member's arena
};

__device__ inline Present present_instance(const Context& context, uint32_t kind) {
  const View& view = context.views[kind];
  const uint64_t number = context.task.instances[kind];
  return {view.size, view.own, number, make_tag(context.task.seed, kind, number),
          view.bank_offset[number % kNumBanks]};
}

// Whether a collective may start. Uniform over a block.
__device__ inline bool may_start(Context& context) {
  if (is_poisoned(context)) return false;
  if (context.task.has_entered != 0) return true;
  const int own = context.rank;
  if (threadIdx.x == 0) {
    leave(context, Record{kNotEntered, own, own, kExchangeLine, context.task.group.dispatch, 0, 0});
  }
  return false;
}

// The next exchange on the edge to a member: its sequence picks line and inbox.
__device__ inline uint64_t edge_count(const Context& context, const View& view, int member) {
  return context.task.exchanges[view.slot[member]];
}

__device__ inline Word exchange_word(const Context& context, uint64_t count, uint32_t tag) {
  return Word{tag, context.plan.first_sequence + static_cast<uint32_t>(count) + 1};
}

__device__ inline bool await_member(Context& context, const View& view, const Present& present,
                                    int member) {
  const Word word = exchange_word(context, edge_count(context, view, member), present.tag);
  const Wait wait{context.rank, view.rank[member], kExchangeLine + word.sequence % 2, word,
                  context.task.group.dispatch, context.task.timeout_ns};
  CudaMemory mem(context);
  Record failure;
  if (await_word(mem, wait, failure) == kOk) return true;
  leave(context, failure);
  return false;
}

// Counts this block as done with a message; the last one of them signals the member.
__device__ inline void publish_part(Context& context, const View& view, const Present& present,
                                    int member, uint32_t num_blocks) {
  uint32_t& arrived = context.arrived[member];
  if (add_acq_rel_gpu(&arrived, 1) + 1 != num_blocks) return;
  arrived = 0;
  const Word word = exchange_word(context, edge_count(context, view, member), present.tag);
  CudaMemory(context).publish(view.rank[member], kExchangeLine + word.sequence % 2, word);
}

// The last block to come here advances the counts that all blocks have read at their start.
__device__ inline void finish(Context& context, uint32_t kind) {
  __syncthreads();
  if (threadIdx.x != 0 || add_acq_rel_gpu(&context.finished, 1) + 1 != gridDim.x) return;
  context.finished = 0;
  const View& view = context.views[kind];
  ++context.task.instances[kind];
  for (int member = 0; member < view.size; ++member) {
    if (member != view.own) ++context.task.exchanges[view.slot[member]];
  }
}

__device__ inline char* result_of(const Context& context, const Present& present, const Move& move,
                                  int rank, int member) {
  return reinterpret_cast<char*>(context.base[rank]) + present.bank + move.result_offset[member];
}

__device__ inline void build_view(Context& context, uint32_t kind) {
  const Descriptor& group = context.task.group;
  View view{};
  view.kind = canonical(group, kind);
  const Members members = members_of(group, view.kind);
  const Region region = region_of(group, view.kind);
  view.size = members.size;
  view.own = members.own;
  for (int bank = 0; bank < kNumBanks; ++bank) {
    view.bank_offset[bank] = region.count == 0 ? 0 : exchange_inbox(context.plan, region, 1, bank, 0).offset;
  }
  view.bank_bytes = region.count == 0 ? 0 : exchange_inbox(context.plan, region, 1, 0, 0).bytes;
  for (int member = 0; member < members.size; ++member) {
    view.slot[member] = members.slot(member);
    view.rank[member] = group.rank[members.slot(member)];
  }
  context.views[kind] = view;
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

// Sizes that the host mirrors: Context, Move, Exchange, Reduction, Chunk.
extern "C" __device__ uint32_t gfc_sizes[5] = {sizeof(Context), sizeof(Move), sizeof(Exchange),
                                               sizeof(Reduction), sizeof(Chunk)};

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
  if (thread < kNumKinds) build_view(context, thread);
  if (thread < group.num_ranks && thread != group.slot) enter_with(context, thread);
  __syncwarp();
  if (thread == 0 && !is_poisoned(context)) context.task.has_entered = 1;
}

// An exchange whose data carry their flags: each 64-bit word is {flag, data}. No fence, no signal.
// Grid: size * max(moves, 1) * num_slices, any block. Needs units of 8 bytes (or no moves: a
// barrier), and messages of at most kFlaggedBytes / 2.
//
// The receiver clears each word that it has read, so an inbox holds nothing but zeros and words of
// the exchange that is under way; after a fault the host clears it. Bank = parity of the edge's
// count: a peer writes here again two exchanges later, after it has read our next message, which
// our next kernel sends, when this one is over.
extern "C" __global__ void __launch_bounds__(512) gfc_flagged(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  const View& view = context.views[exchange.kind];
  __shared__ Box outgoing[kMaxMoves], incoming[kMaxMoves];
  const Present present = present_instance(context, exchange.kind);
  if (!may_start(context)) return;
  const int num_moves = exchange.num_moves, num_items = max(num_moves, 1);
  const int item = blockIdx.x / exchange.num_slices, slice = blockIdx.x % exchange.num_slices;
  const int step = item / num_items, idx = item % num_items;
  const int target = (present.own + step) % present.size;
  const int source = (present.own + present.size - step) % present.size;
  if (threadIdx.x < num_moves) {
    outgoing[threadIdx.x] = box_of(exchange.moves[threadIdx.x], present.size, present.own, target);
  } else if (threadIdx.x >= 32 && threadIdx.x < 32 + num_moves) {
    incoming[threadIdx.x - 32] =
        as_result(box_of(exchange.moves[threadIdx.x - 32], present.size, source, present.own));
  }
  __syncthreads();
  const Move& move = exchange.moves[idx];
  char* result = nullptr;
  if (num_moves != 0) {
    result = move.output != 0 ? reinterpret_cast<char*>(move.output)
                              : result_of(context, present, move, context.rank, present.own);
  }
  const uint32_t first = slice * blockDim.x + threadIdx.x, stride = exchange.num_slices * blockDim.x;
  if (step == 0) {
    if (num_moves != 0) {
      copy_box(reinterpret_cast<const char*>(move.input), result, outgoing[idx], 8, first, stride);
    }
    finish(context, exchange.kind);
    return;
  }
  const uint64_t flag = static_cast<uint64_t>(present.tag | 1) << 32;
  uint64_t sent_before = 0, sent = 0, due_before = 0, due = 0;
  for (int i = 0; i < num_moves; ++i) {
    if (i < idx) sent_before += bytes_of(outgoing[i]) / 8;
    if (i < idx) due_before += bytes_of(incoming[i]) / 8;
    sent += bytes_of(outgoing[i]) / 8;
    due += bytes_of(incoming[i]) / 8;
  }
  const uint64_t count = edge_count(context, view, target);
  const uint64_t due_count = edge_count(context, view, source);
  char* outbox = reinterpret_cast<char*>(context.base[view.rank[target]]) +
                 flagged_offset(context.plan, context.rank, count) + 16 * sent_before;
  char* inbox = reinterpret_cast<char*>(context.base[context.rank]) +
                flagged_offset(context.plan, view.rank[source], due_count) + 16 * due_before;
  if (num_moves != 0) {
    const Box& box = outgoing[idx];
    const uint32_t row_units = static_cast<uint32_t>(box.row_bytes / 8);
    const uint32_t num_units = row_units * box.num_rows;
    for (uint32_t unit = first; unit < num_units; unit += stride) {
      const uint32_t row = box.num_dims == 0 ? 0 : unit / row_units;
      const uint64_t at = locate(box, row).source + static_cast<uint64_t>(unit - row * row_units) * 8;
      const uint2 data = *reinterpret_cast<const uint2*>(move.input + at);
      asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(outbox + 16ull * unit),
                   "l"(flag | data.x), "l"(flag | data.y) : "memory");
    }
  }
  // A message without bytes is one word: the receiver still waits for it.
  if (sent == 0 && idx == 0 && first == 0) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(outbox), "l"(flag) : "memory");
  }
  const uint32_t num_words = num_moves == 0 ? 0 : static_cast<uint32_t>(bytes_of(incoming[idx]) / 8);
  const uint32_t num_due = due == 0 && idx == 0 ? 1 : num_words;
  const uint32_t row_units = num_words == 0 ? 1 : static_cast<uint32_t>(incoming[idx].row_bytes / 8);
  CudaMemory mem(context);
  for (uint32_t unit = first; unit < num_due; unit += stride) {
    char* address = inbox + 16ull * unit;
    uint64_t low, high, started_ns = 0;
    for (uint32_t polls = 1;; ++polls) {
      asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                   : "=l"(low), "=l"(high) : "l"(address) : "memory");
      if (((low ^ flag) >> 32) == 0 && ((high ^ flag) >> 32) == 0) break;
      const uint64_t strange = low >> 32 != 0 && ((low ^ flag) >> 32) != 0 ? low : 0;
      const Wait wait{context.rank, view.rank[source], kExchangeLine, unpack(flag),
                      context.task.group.dispatch, context.task.timeout_ns};
      Status status = strange != 0 ? kProtocol : kOk;
      if (status == kOk && polls % kPollsPerLook == 0) {
        status = is_poisoned(context) ? kAborted : give_up(mem, wait, started_ns);
      }
      if (status != kOk) {
        leave(context, Record{status, wait.rank, wait.peer, wait.line, wait.dispatch, flag, low});
        return;
      }
    }
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(address), "l"(0ull) : "memory");
    if (unit < num_words) {
      const Box& box = incoming[idx];
      const uint32_t row = box.num_dims == 0 ? 0 : unit / row_units;
      const uint64_t at = locate(box, row).target + static_cast<uint64_t>(unit - row * row_units) * 8;
      *reinterpret_cast<uint2*>(result + at) =
          make_uint2(static_cast<uint32_t>(low), static_cast<uint32_t>(high));
    }
  }
  finish(context, exchange.kind);
}

// An exchange by threads, straight into the result's place in each member's arena.
// Grid (size - 1) * moves * num_slices, block of at most 512. A result without an output of its
// own stays in the arena until this rank's next exchange of the kind.
extern "C" __global__ void __launch_bounds__(512) gfc_exchange(const __grid_constant__ Exchange exchange) {
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  const View& view = context.views[exchange.kind];
  __shared__ Box boxes[1 + kMaxMoves];
  __shared__ bool has_arrived;
  const Present present = present_instance(context, exchange.kind);
  if (!may_start(context)) return;
  const int num_moves = exchange.num_moves;
  const int item = blockIdx.x / exchange.num_slices, slice = blockIdx.x % exchange.num_slices;
  const int step = item / num_moves + 1, idx = item % num_moves;
  const int target = (present.own + step) % present.size;
  const Move& move = exchange.moves[idx];
  if (threadIdx.x == 0) boxes[0] = box_of(move, present.size, present.own, target);
  if (threadIdx.x >= 32 && threadIdx.x < 32 + num_moves) {
    boxes[threadIdx.x - 31] =
        box_of(exchange.moves[threadIdx.x - 32], present.size, present.own, present.own);
  }
  __syncthreads();
  const uint32_t first = slice * blockDim.x + threadIdx.x, stride = exchange.num_slices * blockDim.x;
  copy_box(reinterpret_cast<const char*>(move.input),
           result_of(context, present, move, view.rank[target], target), boxes[0],
           exchange.unit_bytes, first, stride);
  __syncthreads();
  if (threadIdx.x == 0) publish_part(context, view, present, target, num_moves * exchange.num_slices);
  for (int i = 0; i < num_moves; ++i) {
    const Move& kept = exchange.moves[i];
    char* to = kept.output != 0 ? reinterpret_cast<char*>(kept.output)
                                : result_of(context, present, kept, context.rank, present.own);
    copy_box(reinterpret_cast<const char*>(kept.input), to, boxes[1 + i], exchange.unit_bytes,
             blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
  }
  if (move.output == 0) {
    // One block waits, a thread for each peer; the end of the kernel passes it on.
    if (blockIdx.x == 0 && threadIdx.x < present.size && static_cast<int>(threadIdx.x) != present.own) {
      await_member(context, view, present, threadIdx.x);
    }
    finish(context, exchange.kind);
    return;
  }
  const int source = (present.own + present.size - step) % present.size;
  if (threadIdx.x == 0) {
    has_arrived = await_member(context, view, present, source);
    boxes[0] = as_result(box_of(move, present.size, source, present.own));
  }
  __syncthreads();
  if (!has_arrived) return;
  copy_box(result_of(context, present, move, context.rank, present.own),
           reinterpret_cast<char*>(move.output), boxes[0], exchange.unit_bytes, first, stride);
  finish(context, exchange.kind);
}

#if __CUDA_ARCH__ >= 900
// The same by bulk copies through shared memory. Grid as above, block 32; shared memory of
// kStages * tile_bytes. Needs units of 16 bytes.
extern "C" __global__ void __launch_bounds__(32) gfc_bulk(const __grid_constant__ Exchange exchange) {
  extern __shared__ __align__(128) char tiles[];
  __shared__ uint64_t barriers[kStages];
  __shared__ Box box;
  Context& context = *reinterpret_cast<Context*>(exchange.context);
  const View& view = context.views[exchange.kind];
  const Present present = present_instance(context, exchange.kind);
  if (!may_start(context)) return;
  BulkCopier copier(tiles, barriers, exchange.tile_bytes);
  const int num_moves = exchange.num_moves;
  const int item = blockIdx.x / exchange.num_slices, slice = blockIdx.x % exchange.num_slices;
  const int step = item / num_moves + 1, idx = item % num_moves;
  const int target = (present.own + step) % present.size;
  const Move& move = exchange.moves[idx];
  if (threadIdx.x == 0) box = box_of(move, present.size, present.own, target);
  __syncwarp();
  copier.copy(reinterpret_cast<const char*>(move.input),
              result_of(context, present, move, view.rank[target], target), box, slice,
              exchange.num_slices);
  if (threadIdx.x == 0) publish_part(context, view, present, target, num_moves * exchange.num_slices);
  for (int i = 0; i < num_moves; ++i) {
    const Move& kept = exchange.moves[i];
    if (threadIdx.x == 0) box = box_of(kept, present.size, present.own, present.own);
    __syncwarp();
    char* to = kept.output != 0 ? reinterpret_cast<char*>(kept.output)
                                : result_of(context, present, kept, context.rank, present.own);
    copier.copy(reinterpret_cast<const char*>(kept.input), to, box, blockIdx.x, gridDim.x);
  }
  if (move.output == 0) {
    if (blockIdx.x == 0 && threadIdx.x < present.size && static_cast<int>(threadIdx.x) != present.own) {
      await_member(context, view, present, threadIdx.x);
    }
    finish(context, exchange.kind);
    return;
  }
  const int source = (present.own + present.size - step) % present.size;
  bool has_arrived = true;
  if (threadIdx.x == 0) {
    has_arrived = await_member(context, view, present, source);
    box = as_result(box_of(move, present.size, source, present.own));
  }
  if (__any_sync(0xffffffffu, !has_arrived)) return;
  asm volatile("fence.proxy.async;" ::: "memory");  // peers' bytes, before bulk copies read them
  copier.copy(result_of(context, present, move, context.rank, present.own),
              reinterpret_cast<char*>(move.output), box, slice, exchange.num_slices);
  finish(context, exchange.kind);
}
#endif

namespace gfc {

__device__ inline float as_float(uint32_t item_type, const void* items, uint64_t idx) {
  if (item_type == 0) return static_cast<const float*>(items)[idx];
  const uint32_t bits = static_cast<const uint16_t*>(items)[idx];
  float value;
  if (item_type == 1) return __uint_as_float(bits << 16);
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "r"(bits));
  return value;
}

__device__ inline void store_float(uint32_t item_type, void* items, uint64_t idx, float value) {
  if (item_type == 0) {
    static_cast<float*>(items)[idx] = value;
    return;
  }
  uint16_t bits;
  if (item_type == 1) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  static_cast<uint16_t*>(items)[idx] = bits;
}

constexpr int kMaxItemsPerWord = 4;

}  // namespace gfc

// All-reduce in one shot, for small tensors: everyone sends everything with flags, and adds the
// contributions in the order of the slots, in fp32. Any grid, any block. num_items * item bytes is
// a multiple of 8 and at most kFlaggedBytes / 2. Flags and banks as in gfc_flagged.
extern "C" __global__ void __launch_bounds__(512)
gfc_all_reduce(const __grid_constant__ Reduction reduction) {
  Context& context = *reinterpret_cast<Context*>(reduction.context);
  const View& view = context.views[reduction.kind];
  const Present present = present_instance(context, reduction.kind);
  if (!may_start(context)) return;
  const int items_per_word = reduction.item_type == 0 ? 2 : 4;
  const uint32_t num_words = static_cast<uint32_t>(reduction.num_items / items_per_word);
  const uint64_t flag = static_cast<uint64_t>(present.tag | 1) << 32;
  const uint32_t stride = gridDim.x * blockDim.x;
  CudaMemory mem(context);
  for (uint32_t word = blockIdx.x * blockDim.x + threadIdx.x; word < num_words; word += stride) {
    const uint2 data = reinterpret_cast<const uint2*>(reduction.input)[word];
    for (int step = 1; step < present.size; ++step) {
      const int target = (present.own + step) % present.size;
      char* outbox = reinterpret_cast<char*>(context.base[view.rank[target]]) +
                     flagged_offset(context.plan, context.rank, edge_count(context, view, target));
      asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(outbox + 16ull * word),
                   "l"(flag | data.x), "l"(flag | data.y) : "memory");
    }
  }
  for (uint32_t word = blockIdx.x * blockDim.x + threadIdx.x; word < num_words; word += stride) {
    float sum[kMaxItemsPerWord] = {};
    for (int member = 0; member < present.size; ++member) {
      uint2 data = reinterpret_cast<const uint2*>(reduction.input)[word];
      if (member != present.own) {
        char* address = reinterpret_cast<char*>(context.base[context.rank]) +
                        flagged_offset(context.plan, view.rank[member], edge_count(context, view, member)) +
                        16ull * word;
        uint64_t low, high, started_ns = 0;
        for (uint32_t polls = 1;; ++polls) {
          asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                       : "=l"(low), "=l"(high) : "l"(address) : "memory");
          if (((low ^ flag) >> 32) == 0 && ((high ^ flag) >> 32) == 0) break;
          if (polls % kPollsPerLook != 0) continue;
          const Wait wait{context.rank, view.rank[member], kExchangeLine, unpack(flag),
                          context.task.group.dispatch, context.task.timeout_ns};
          const Status status = is_poisoned(context) ? kAborted : give_up(mem, wait, started_ns);
          if (status == kOk) continue;
          leave(context, Record{status, wait.rank, wait.peer, wait.line, wait.dispatch, flag, low});
          return;
        }
        asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %1};" ::"l"(address), "l"(0ull) : "memory");
        data = make_uint2(static_cast<uint32_t>(low), static_cast<uint32_t>(high));
      }
#pragma unroll
      for (int i = 0; i < kMaxItemsPerWord; ++i) {
        if (i < items_per_word) sum[i] += as_float(reduction.item_type, &data, i);
      }
    }
#pragma unroll
    for (int i = 0; i < kMaxItemsPerWord; ++i) {
      if (i < items_per_word) {
        store_float(reduction.item_type, reinterpret_cast<void*>(reduction.output),
                    static_cast<uint64_t>(word) * items_per_word + i, sum[i]);
      }
    }
  }
  finish(context, reduction.kind);
}

// Adds `num_terms` arrays that lie `stride` items apart, in order, in fp32. Any grid, any block.
extern "C" __global__ void __launch_bounds__(512) gfc_reduce(const __grid_constant__ Reduction reduction) {
  const void* input = reinterpret_cast<const void*>(reduction.input);
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  uint64_t idx = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; idx < reduction.num_items; idx += step) {
    float sum = 0;
    for (uint32_t term = 0; term < reduction.num_terms; ++term) {
      sum += as_float(reduction.item_type, input, term * reduction.stride + idx);
    }
    store_float(reduction.item_type, reinterpret_cast<void*>(reduction.output), idx, sum);
  }
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

// Sends one chunk: waits until its bank is free, pushes, signals; `steps` picks which of these,
// for chunks that the copy engine moves in between. Any grid, any block; bytes at most post_bytes.
extern "C" __global__ void __launch_bounds__(512) gfc_send(const __grid_constant__ Chunk chunk) {
  Context& context = *reinterpret_cast<Context*>(chunk.context);
  const int peer = chunk.peer;
  const uint64_t count = context.edges.sent[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = context.plan.first_sequence + static_cast<uint32_t>(count) + 1;
  if (is_broken(context, peer)) return;
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
  const uint32_t tag = transfer_tag(context, chunk, context.rank, peer, kPostPurpose);
  CudaMemory(context).publish(peer, kPostLine + bank, Word{tag, sequence});
  context.edges.credit_tag[peer][bank] = transfer_tag(context, chunk, context.rank, peer, kCreditPurpose);
  context.edges.sent[peer] = count + 1;
}

// Receives one chunk and gives its bank back. Any grid, any block.
extern "C" __global__ void __launch_bounds__(512) gfc_recv(const __grid_constant__ Chunk chunk) {
  Context& context = *reinterpret_cast<Context*>(chunk.context);
  const int peer = chunk.peer;
  const uint64_t count = context.edges.received[peer];
  const uint32_t bank = static_cast<uint32_t>(count % kNumBanks);
  const uint32_t sequence = context.plan.first_sequence + static_cast<uint32_t>(count) + 1;
  if (is_broken(context, peer)) return;
  const Word post{transfer_tag(context, chunk, peer, context.rank, kPostPurpose), sequence};
  if (!await_transfer(context, chunk, kPostLine + bank, post)) return;
  copy_dense(reinterpret_cast<const char*>(context.base[context.rank]) +
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

// Starts transfers with a peer anew after a fault, and clears what a message with flags may have
// left half-read. Any grid, any block; nothing else runs on this edge, on either side.
extern "C" __global__ void __launch_bounds__(512) gfc_restart_edge(uint64_t address, int peer, uint32_t incarnation) {
  Context& context = *reinterpret_cast<Context*>(address);
  char* own = reinterpret_cast<char*>(context.base[context.rank]);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    CudaMemory mem(context);
    restart_edge(mem, context.edges, peer);
    context.incarnation[peer] = incarnation;
    context.sent_blocks[peer] = context.received_blocks[peer] = 0;
  }
  uint4* words = reinterpret_cast<uint4*>(own + flagged_offset(context.plan, peer, 0));
  const uint32_t num_words = static_cast<uint32_t>(kNumBanks * kFlaggedBytes / sizeof(uint4));
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < num_words; i += gridDim.x * blockDim.x) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}
