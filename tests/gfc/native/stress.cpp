// Random overlapping groups on the real collectives: processes over memfds, or threads (TSan).
//
//   stress processes|threads NUM_RANKS NUM_INSTANCES SEED FIRST_SEQUENCE
//
// All ranks follow one script drawn from the seed. Each task takes a random ordered subset of
// ranks and random degrees; each instance random shapes, strides, splits and item sizes. Outputs
// are poisoned beforehand and every byte is compared. Delays are drawn per rank.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "capi.h"

namespace {

constexpr unsigned char kPoison = 0xa5;
constexpr uint64_t kTimeoutNs = 60ull * 1000 * 1000 * 1000;

// Small arenas, so that many exchanges need several rounds.
gfc::Plan plan_from(uint32_t first_sequence) { return {1 << 16, 1 << 10, first_sequence, 0}; }

using Random = std::mt19937_64;

int draw(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint64_t>(high - low + 1));
}

void delay(Random& random) {
  const int kind = draw(random, 0, 19);
  if (kind < 2) sched_yield();
  if (kind == 2) {
    const timespec pause{0, draw(random, 1, 200) * 1000};
    nanosleep(&pause, nullptr);
  }
}

// A tensor in private memory with a random order of dimensions and gaps between rows.
struct Tensor {
  std::vector<char> bytes;
  int64_t stride[gfc::kMaxDims] = {};

  Tensor(Random& random, const std::vector<int64_t>& shape, int64_t item_bytes) {
    std::vector<int> order(shape.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    if (draw(random, 0, 2) == 0) std::shuffle(order.begin(), order.end(), random);
    int64_t step = item_bytes * draw(random, 1, 2);
    for (size_t i = order.size(); i-- > 0;) {
      stride[order[i]] = step;
      step *= std::max<int64_t>(shape[order[i]], 1);
    }
    bytes.assign(static_cast<size_t>(step), static_cast<char>(kPoison));
  }
};

// Calls visit(address, index in the global tensor) for each item of a tensor that holds the
// global coordinates from `first` on.
template <class Visit>
void for_items(Tensor& tensor, const std::vector<int64_t>& shape, const std::vector<int64_t>& first,
               const std::vector<int64_t>& global, Visit visit) {
  std::vector<int64_t> index(shape.size(), 0);
  for (int64_t extent : shape) {
    if (extent == 0) return;
  }
  for (;;) {
    int64_t offset = 0, linear = 0;
    for (size_t dim = 0; dim < shape.size(); ++dim) {
      offset += index[dim] * tensor.stride[dim];
      linear = linear * global[dim] + first[dim] + index[dim];
    }
    visit(&tensor.bytes[static_cast<size_t>(offset)], static_cast<uint64_t>(linear));
    size_t dim = shape.size();
    while (dim > 0 && ++index[dim - 1] == shape[dim - 1]) index[--dim] = 0;
    if (dim == 0) return;
  }
}

std::vector<int64_t> uneven(Random& random, int parts, int high) {
  std::vector<int64_t> sizes(static_cast<size_t>(parts));
  for (int64_t& size : sizes) size = draw(random, 0, high);
  return sizes;
}

int64_t sum(const std::vector<int64_t>& sizes, int count) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) total += sizes[static_cast<size_t>(i)];
  return total;
}

struct Rank {
  gfc_context* context;
  int rank;
  Random delays;
  std::string fault;

  void demand(bool holds, const char* what, uint64_t dispatch) {
    if (holds || !fault.empty()) return;
    fault = std::string(what) + " at dispatch " + std::to_string(dispatch);
  }
};

struct Prepared {
  Tensor input, output;
  std::vector<int64_t> output_shape, output_first, global;
  uint64_t seed;
};

void verify(Rank& self, Prepared& item, int64_t item_bytes, uint64_t dispatch) {
  for_items(item.output, item.output_shape, item.output_first, item.global,
            [&](const char* at, uint64_t linear) {
              const uint64_t value = gfc::mix(item.seed, linear);
              self.demand(memcmp(at, &value, static_cast<size_t>(item_bytes)) == 0, "wrong bytes",
                          dispatch);
            });
}

void exchange(Rank& self, gfc::Task& task, uint32_t kind, uint64_t shape_seed) {
  Random random(shape_seed);  // the same on all ranks
  const gfc::Subgroup subgroup = gfc::subgroup_of(task.group, gfc::canonical(task.group, kind));
  const int num_parts = draw(random, 0, 3);
  const int high = draw(random, 0, 15) == 0 ? 40 : 5;  // now and then more than fits a bank
  std::vector<gfc::Part> parts;
  std::vector<Prepared> prepared;
  for (int i = 0; i < num_parts; ++i) {
    const int num_dims = draw(random, 2, 4);
    const int64_t item_bytes = 1ll << draw(random, 0, 3);
    const int split_dim = draw(random, -1, num_dims - 1);
    int concat_dim = draw(random, 0, num_dims - 1);
    if (concat_dim == split_dim) concat_dim = (split_dim + 1) % num_dims;
    const std::vector<int64_t> split = uneven(random, subgroup.size, high);
    const std::vector<int64_t> concat = uneven(random, subgroup.size, high);
    std::vector<int64_t> global(static_cast<size_t>(num_dims));
    for (int64_t& extent : global) extent = draw(random, 1, 4);
    if (split_dim >= 0) global[split_dim] = sum(split, subgroup.size);
    global[concat_dim] = sum(concat, subgroup.size);
    std::vector<int64_t> in = global, out = global, in_first(global.size()), out_first(global.size());
    in[concat_dim] = concat[subgroup.own];
    in_first[concat_dim] = sum(concat, subgroup.own);
    if (split_dim >= 0) out[split_dim] = split[subgroup.own];
    if (split_dim >= 0) out_first[split_dim] = sum(split, subgroup.own);
    Prepared item{Tensor(self.delays, in, item_bytes), Tensor(self.delays, out, item_bytes), out,
                  out_first, global, random()};
    for_items(item.input, in, in_first, global, [&](char* at, uint64_t linear) {
      const uint64_t value = gfc::mix(item.seed, linear);
      memcpy(at, &value, static_cast<size_t>(item_bytes));
    });
    prepared.push_back(std::move(item));
    gfc::Part part{};
    part.input = prepared.back().input.bytes.data();
    part.output = prepared.back().output.bytes.data();
    part.item_bytes = static_cast<int32_t>(item_bytes);
    part.num_dims = num_dims;
    part.split_dim = split_dim;
    part.concat_dim = concat_dim;
    std::copy(global.begin(), global.end(), part.shape);
    memcpy(part.input_stride, prepared.back().input.stride, sizeof(part.input_stride));
    memcpy(part.output_stride, prepared.back().output.stride, sizeof(part.output_stride));
    std::copy(split.begin(), split.end(), part.split_sizes);
    std::copy(concat.begin(), concat.end(), part.concat_sizes);
    parts.push_back(part);
  }
  delay(self.delays);
  const int status = gfc_exchange(self.context, &task, kind, parts.data(), num_parts);
  self.demand(status == gfc::kOk, "exchange failed", task.group.dispatch);
  delay(self.delays);
  for (int i = 0; i < num_parts; ++i) {
    verify(self, prepared[static_cast<size_t>(i)], parts[static_cast<size_t>(i)].item_bytes,
           task.group.dispatch);
  }
}

void transfer(Rank& self, int source, int target, uint64_t dispatch, Random& random) {
  const int64_t count = draw(random, 0, 5000);
  const uint64_t seed = random();
  if (self.rank != source && self.rank != target) return;
  Tensor tensor(self.delays, {count}, 1);
  const gfc::Block block{tensor.bytes.data(), 1, 1, {count}, {tensor.stride[0]}};
  gfc::Record failure;
  if (self.rank == source) {
    for_items(tensor, {count}, {0}, {count}, [&](char* at, uint64_t linear) {
      *at = static_cast<char>(gfc::mix(seed, linear));
    });
    const int status = gfc_send(self.context, target, dispatch, 3, &block, kTimeoutNs, &failure);
    self.demand(status == gfc::kOk, "send failed", dispatch);
    return;
  }
  const int status = gfc_recv(self.context, source, dispatch, 3, &block, kTimeoutNs, &failure);
  self.demand(status == gfc::kOk, "receive failed", dispatch);
  for_items(tensor, {count}, {0}, {count}, [&](char* at, uint64_t linear) {
    self.demand(*at == static_cast<char>(gfc::mix(seed, linear)), "wrong bytes", dispatch);
  });
}

gfc::Descriptor draw_group(Random& random, int num_ranks, uint64_t dispatch, int own) {
  std::vector<int> ranks(static_cast<size_t>(num_ranks));
  for (int i = 0; i < num_ranks; ++i) ranks[static_cast<size_t>(i)] = i;
  std::shuffle(ranks.begin(), ranks.end(), random);
  const int size = draw(random, 1, num_ranks);
  gfc::Descriptor group{};
  group.dispatch = dispatch;
  group.num_ranks = static_cast<uint8_t>(size);
  group.slot = 0xff;
  for (int slot = 0; slot < size; ++slot) {
    const int rank = ranks[static_cast<size_t>(slot)];
    group.rank[slot] = static_cast<uint8_t>(rank);
    group.incarnation[slot] = 1;
    if (rank == own) group.slot = static_cast<uint8_t>(slot);
  }
  int left = size;
  group.cfg = static_cast<uint8_t>(left % 2 == 0 && draw(random, 0, 1) ? 2 : 1);
  left /= group.cfg;
  std::vector<int> divisors;
  for (int divisor = 1; divisor <= left; ++divisor) {
    if (left % divisor == 0) divisors.push_back(divisor);
  }
  group.ring = static_cast<uint8_t>(divisors[random() % divisors.size()]);
  left /= group.ring;
  group.torus = static_cast<uint8_t>(draw(random, 1, left));
  while (left % group.torus != 0) --group.torus;
  group.ulysses = static_cast<uint8_t>(left / group.torus);
  return group;
}

void run_script(Rank& self, int num_ranks, int num_instances, uint64_t seed) {
  Random script(seed);
  // Near the wrap of the 32 bits that travel in entry words.
  uint64_t dispatch = (1ull << 32) - 40;
  for (int done = 0; done < num_instances && self.fault.empty();) {
    dispatch += static_cast<uint64_t>(draw(script, 1, 2));
    const gfc::Descriptor group = draw_group(script, num_ranks, dispatch, self.rank);
    const int num_exchanges = draw(script, 0, 5);
    const bool takes_part = group.slot != 0xff;
    gfc::Task task;
    if (takes_part) {
      gfc_task_begin(&task, &group, kTimeoutNs);
      delay(self.delays);
      self.demand(gfc_enter(self.context, &task) == gfc::kOk, "entry failed", dispatch);
    }
    for (int i = 0; i < num_exchanges; ++i, ++done) {
      const uint32_t kind = static_cast<uint32_t>(draw(script, 0, gfc::kNumKinds - 1));
      const uint64_t shape_seed = script();
      if (!takes_part || !self.fault.empty()) continue;
      // Groups of one kind are disjoint: each draws shapes of its own.
      const gfc::Subgroup subgroup = gfc::subgroup_of(group, gfc::canonical(group, kind));
      exchange(self, task, kind, shape_seed + static_cast<uint64_t>(subgroup.first));
    }
    if (num_ranks > 1 && draw(script, 0, 2) == 0) {
      const int source = draw(script, 0, num_ranks - 1);
      const int target = (source + draw(script, 1, num_ranks - 1)) % num_ranks;
      transfer(self, source, target, dispatch, script);
      ++done;
    }
  }
}

int run_rank(int rank, int num_ranks, int num_instances, uint64_t seed, const gfc::Plan& plan,
             const std::vector<char*>& bases) {
  Rank self{gfc_context_create(&plan, rank), rank, Random(seed * 64 + rank), ""};
  for (int peer = 0; peer < num_ranks; ++peer) gfc_context_map(self.context, peer, 1, bases[peer]);
  run_script(self, num_ranks, num_instances, seed);
  gfc_context_destroy(self.context);
  if (self.fault.empty()) return 0;
  fprintf(stderr, "rank %d: %s\n", rank, self.fault.c_str());
  // The others would wait for their time-out; nothing they could still find matters.
  for (char* base : bases) gfc_arena_abort_through(base, ~0ull);
  return 1;
}

int run_processes(int num_ranks, int num_instances, uint64_t seed, const gfc::Plan& plan) {
  const uint64_t bytes = gfc_arena_bytes(&plan);
  std::vector<int> fds;
  for (int rank = 0; rank < num_ranks; ++rank) {
    fds.push_back(memfd_create("gfc-stress", 0));
    if (ftruncate(fds.back(), static_cast<off_t>(bytes)) != 0) return 2;
    char* base = gfc_arena_map(fds.back(), bytes);
    gfc_arena_format(base, &plan, rank, 1);
    gfc_arena_unmap(base, bytes);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (fork() != 0) continue;
    std::vector<char*> bases;
    for (int fd : fds) bases.push_back(gfc_arena_map(fd, bytes));
    _exit(run_rank(rank, num_ranks, num_instances, seed, plan, bases));
  }
  int num_failed = 0, status = 0;
  while (wait(&status) > 0) num_failed += status != 0;
  return num_failed;
}

int run_threads(int num_ranks, int num_instances, uint64_t seed, const gfc::Plan& plan) {
  const uint64_t bytes = gfc_arena_bytes(&plan);
  std::vector<char*> bases;
  std::vector<std::thread> threads;
  std::vector<int> failed(static_cast<size_t>(num_ranks));
  for (int rank = 0; rank < num_ranks; ++rank) {
    bases.push_back(static_cast<char*>(aligned_alloc(gfc::kPageBytes, bytes)));
    memset(bases.back(), 0, bytes);
    gfc_arena_format(bases.back(), &plan, rank, 1);
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      failed[static_cast<size_t>(rank)] =
          run_rank(rank, num_ranks, num_instances, seed, plan, bases);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (char* base : bases) free(base);
  return static_cast<int>(std::count(failed.begin(), failed.end(), 1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const int num_ranks = atoi(argv[2]), num_instances = atoi(argv[3]);
  const uint64_t seed = strtoull(argv[4], nullptr, 0);
  const gfc::Plan plan = plan_from(static_cast<uint32_t>(strtoull(argv[5], nullptr, 0)));
  const bool is_threads = strcmp(argv[1], "threads") == 0;
  const int num_failed = (is_threads ? run_threads : run_processes)(num_ranks, num_instances, seed, plan);
  printf("%s: %d instances over %d ranks, seed %llu, %d ranks failed\n", argv[1], num_instances,
         num_ranks, static_cast<unsigned long long>(seed), num_failed);
  return num_failed == 0 ? 0 : 1;
}
