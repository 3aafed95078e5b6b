// Scripts for the checker: the real protocol, and broken and safe variants of it.
#pragma once

#include <initializer_list>
#include <vector>

#include "checker.h"

namespace check {

using Ranks = std::vector<int>;

// One task of a script: who takes part, and which kinds of groups exchange in which order.
struct TaskSpec {
  uint64_t dispatch;
  Ranks ranks;
  std::vector<uint32_t> kinds;
  int cfg = 1, ring = 1, torus = 1;
  int slot_of(int rank) const;
};

gfc::Descriptor describe(const TaskSpec& spec, int rank);

// Runs the real `enter` and `exchange` for each task that the rank takes part in.
Program real_tasks(std::vector<TaskSpec> tasks);
void real_tasks_with(Memory& mem, gfc::Edges& edges, const std::vector<TaskSpec>& tasks);

// A payload whose bytes are a token of (task, kind, instance, source).
class Tokens {
 public:
  Tokens(Memory& mem, uint64_t token, const gfc::Task& task, uint32_t kind)
      : mem_(mem), token_(token), group_(task.group), kind_(kind) {}
  void push(int rank, int, gfc::Span span) { mem_.write_bytes(rank, span, token_ + mem_.rank()); }
  void collect(int slot, gfc::Span span) {
    const gfc::Subgroup subgroup = gfc::subgroup_of(group_, gfc::canonical(group_, kind_));
    mem_.read_bytes(mem_.rank(), span, token_ + group_.rank[subgroup.layout_slot(slot)]);
  }
  void keep() {}

 private:
  Memory& mem_;
  uint64_t token_;
  gfc::Descriptor group_;
  uint32_t kind_;
};

struct Case {
  const char* name;
  bool is_safe;
  const char* fault;  // what must be in the report of a broken one
  Scenario scenario;
};

std::vector<Case> all_cases();

// By file: the real code; the variants that move data otherwise; aborts, deaths and parking.
void add_real_cases(std::vector<Case>& cases);
void add_variant_cases(std::vector<Case>& cases);
void add_fault_cases(std::vector<Case>& cases);

}  // namespace check
