// The index arithmetic of the CUDA kernels, for a test on the host (tests/gfc/test_cuda_host.py).
#include <cstring>

#include "cuda/boxes.h"

static_assert(sizeof(gfc::Context) == 2272 && sizeof(gfc::Move) == 208 &&
                  sizeof(gfc::Exchange) == 872 && sizeof(gfc::Chunk) == 64,
              "gfgen/gfc/cuda/kernels.py mirrors these");

extern "C" void sizes(uint32_t* found) {
  const size_t all[] = {sizeof(gfc::Context), sizeof(gfc::Move), sizeof(gfc::Exchange), sizeof(gfc::Chunk)};
  for (size_t size : all) *found++ = static_cast<uint32_t>(size);
}

// What the kernels do with one message of one tensor, row by row.
extern "C" void move_box(const gfc::Move* move, int num_slots, int source, int target,
                         const char* input, char* bank) {
  const gfc::Box box = gfc::box_of(*move, num_slots, source, target);
  char* result = bank + move->result_offset[target];
  for (uint32_t row = 0; row < box.num_rows; ++row) {
    const gfc::Place place = gfc::locate(box, row);
    std::memcpy(result + place.target, input + place.source, static_cast<size_t>(box.row_bytes));
  }
}

// The same by way of the packed form in the arena, as for results that leave it.
extern "C" void move_box_packed(const gfc::Move* move, int num_slots, int source, int target,
                                const char* input, char* bank, char* output) {
  const gfc::Box box = gfc::box_of(*move, num_slots, source, target);
  const gfc::Box there = gfc::as_packed(box, gfc::packed_offset(*move, source, target));
  const gfc::Box out = gfc::as_unpacked(box, gfc::packed_offset(*move, source, target));
  char* staging = bank + move->result_offset[target];
  for (uint32_t row = 0; row < box.num_rows; ++row) {
    const gfc::Place place = gfc::locate(there, row);
    std::memcpy(staging + place.target, input + place.source, static_cast<size_t>(box.row_bytes));
  }
  for (uint32_t row = 0; row < box.num_rows; ++row) {
    const gfc::Place place = gfc::locate(out, row);
    std::memcpy(output + move->result_offset[target] + place.target, staging + place.source,
                static_cast<size_t>(box.row_bytes));
  }
}

// The bank of a kind, as gfc_enter works it out.
extern "C" void bank(const gfc::Plan* plan, const gfc::Descriptor* group, uint32_t kind, uint64_t* found) {
  const gfc::Region region = gfc::region_of(*group, gfc::canonical(*group, kind));
  found[0] = gfc::exchange_inbox(*plan, region, 1, 0, 0).offset;
  found[1] = gfc::exchange_inbox(*plan, region, 1, 1, 0).offset;
  found[2] = gfc::exchange_inbox(*plan, region, 1, 0, 0).bytes;
}
