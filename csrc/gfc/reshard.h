// What the CPU collectives move: tensors that change from shards along one dimension to shards
// along another. all_gather and both exchanges of attention are this.
#pragma once

#include "cpu_memory.h"
#include "strided.h"

namespace gfc {

// One tensor of an exchange, as one rank sees it. The input holds all of `split_dim` and the own
// share of `concat_dim`; the output the own share of `split_dim` and all of `concat_dim`.
// Every rank knows all sizes, so it computes the length of every message itself.
struct Part {
  char* input;
  char* output;
  int32_t item_bytes;
  int32_t num_dims;
  int32_t split_dim;  // -1: each rank gets the whole input
  int32_t concat_dim;
  int64_t shape[kMaxDims];  // the entries of the two dimensions above are not used
  int64_t input_stride[kMaxDims];   // in bytes
  int64_t output_stride[kMaxDims];  // in bytes
  int64_t split_sizes[kMaxRanks];   // by slot
  int64_t concat_sizes[kMaxRanks];
};

// The block of a part that `source` sends to `target`, in the source's input or target's output.
Block outgoing(const Part& part, int source, int target);
Block incoming(const Part& part, int source, int target);

// All parts of one exchange, one round at a time: round r moves the bytes from r * chunk on of
// each message, where a message is a pair's packed parts behind each other.
class Reshard {
 public:
  Reshard(const CpuMemory& mem, const Part* parts, int num_parts, Subgroup subgroup)
      : mem_(mem), parts_(parts), num_parts_(num_parts), subgroup_(subgroup) {}

  uint64_t longest_message() const;
  void start_round(uint64_t round) { round_ = round; }

  void push(int rank, int slot, Span inbox);
  void collect(int slot, Span inbox);
  void keep();

 private:
  const CpuMemory& mem_;
  const Part* parts_;
  int num_parts_;
  Subgroup subgroup_;
  uint64_t round_ = 0;
};

}  // namespace gfc
