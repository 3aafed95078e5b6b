#include "checker.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <unordered_set>

namespace check {

constexpr int kMaxProcesses = gfc::kMaxRanks + 1;
constexpr size_t kStackBytes = 64 * 1024;
constexpr uint64_t kNumBytes = 64;  // of each arena: point-to-point inboxes, then exchanges

using Clock = std::array<uint32_t, kMaxProcesses>;

struct Watch {
  const uint64_t* word;
  uint64_t seen;
};

struct Process {
  ucontext_t context;
  jmp_buf resume;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool is_started = false, is_done = false;
  Pending pending;
  uint64_t history = 0, mark = 0;
  std::vector<Watch> watches;
  uint64_t seen_abort = 0, mark_abort = 0;
  int accesses_left = 0;  // until the death that a scenario arranges; 0: none
  jmp_buf death;
  bool is_woken = false, is_asleep = false;
  Clock clock{};
};

// Who stored to a line last, and when by that process's own clock.
struct Stamp {
  int writer = -1;
  uint32_t written_at = 0;
};

// One byte-sized cell of an arena, and who accessed it last: for races by happens-before.
struct Cell {
  uint64_t token = 0;
  Stamp stamp;
  Clock read_at{};
};

class World {
 public:
  explicit World(const Scenario& scenario);
  Result explore(uint64_t max_states);

 private:
  friend class Memory;
  friend class Memory::Bell;
  struct Frame {
    size_t depth;
    uint64_t state;
    std::vector<int> choices;
  };

  void reset();
  void step(int process);
  bool is_enabled(const Process& process) const;
  std::vector<int> enabled() const;
  uint64_t state_hash() const;
  void check_races();
  bool extend(uint64_t max_states);
  void stop_before(int rank, Pending pending);
  void observe(int rank, uint64_t value) {
    processes_[rank].history = gfc::mix(processes_[rank].history, value);
  }
  void release(int rank, Clock& into);
  void acquire(int rank, const Clock& from);
  void store(int rank, size_t index, gfc::Word word);
  bool is_ordered(int rank, const Stamp& stamp) const {
    return stamp.writer < 0 || stamp.written_at <= processes_[rank].clock[stamp.writer];
  }
  void set_fault(const std::string& fault);
  static void entry();
  std::string describe(int process) const;

  uint64_t& line(int owner, int source, uint32_t line) {
    return lines_[(owner * gfc::kMaxRanks + source) * gfc::kNumLines + line];
  }
  size_t line_index(int owner, int source, uint32_t line) const {
    return (owner * gfc::kMaxRanks + source) * gfc::kNumLines + line;
  }
  uint64_t cell_index(uint64_t offset) const {
    if (offset >= gfc::data_offset(plan_)) return 16 + offset - gfc::data_offset(plan_);
    return offset - gfc::posts_offset();
  }

  const Scenario& scenario_;
  gfc::Plan plan_;
  int num_processes_;
  std::vector<Process> processes_;
  std::vector<uint64_t> lines_;
  std::vector<Clock> line_clocks_;
  std::vector<Stamp> line_stamps_;
  std::array<std::array<Cell, kNumBytes>, gfc::kMaxRanks> cells_;
  std::array<uint64_t, gfc::kMaxRanks> aborted_;
  std::array<uint32_t, gfc::kMaxRanks> bell_, parked_;
  std::array<Clock, gfc::kMaxRanks> bell_clocks_;
  int num_joined_ = 0, num_joins_ = 0;
  Clock join_clock_{};

  jmp_buf scheduler_;
  std::vector<int> path_;
  std::vector<Frame> frames_;
  std::unordered_set<uint64_t> visited_;
  std::string fault_;
  static World* current_;
  static int starting_;
};

World* World::current_ = nullptr;
int World::starting_ = 0;

World::World(const Scenario& scenario)
    : scenario_(scenario),
      plan_(scenario.plan),
      num_processes_(scenario.num_ranks + scenario.num_hosts),
      processes_(num_processes_),
      lines_(gfc::kMaxRanks * gfc::kMaxRanks * gfc::kNumLines),
      line_clocks_(lines_.size()),
      line_stamps_(lines_.size()) {
  for (Process& process : processes_) getcontext(&process.context);
}

void World::entry() {
  World& world = *current_;
  const int self = starting_;
  Memory mem(world, self);
  const Scenario& scenario = world.scenario_;
  (self < scenario.num_ranks ? scenario.program : scenario.host)(mem);
  world.processes_[self].is_done = true;
  _longjmp(world.scheduler_, 1);
}

void World::reset() {
  for (Process& process : processes_) {
    process.is_started = process.is_done = process.is_woken = process.is_asleep = false;
    process.pending = Pending{};
    process.history = process.mark = 0;
    process.seen_abort = process.mark_abort = 0;
    process.accesses_left = 0;
    process.watches.clear();
    process.clock = Clock{};
  }
  const uint64_t start = gfc::pack(gfc::Word{0, plan_.first_sequence});
  for (int owner = 0; owner < scenario_.num_ranks; ++owner) {  // nobody touches the others' arenas
    for (int source = 0; source < scenario_.num_ranks; ++source) {
      for (uint32_t i = 0; i < gfc::kNumLines; ++i) {
        const size_t index = line_index(owner, source, i);
        lines_[index] = i < gfc::kExchangeLine ? 0 : start;
        line_clocks_[index] = Clock{};
        line_stamps_[index] = Stamp{};
      }
    }
    cells_[owner].fill(Cell{});
  }
  aborted_.fill(0);
  bell_.fill(0);
  parked_.fill(0);
  bell_clocks_.fill(Clock{});
  num_joined_ = num_joins_ = 0;
  join_clock_ = Clock{};
}

// Lets one process perform its pending access and run up to the next one.
void World::step(int self) {
  Process& process = processes_[self];
  ++process.clock[self];
  path_.push_back(self);
  if (_setjmp(scheduler_) != 0) return;
  if (process.is_started) _longjmp(process.resume, 1);
  process.is_started = true;
  process.context.uc_stack.ss_sp = process.stack.get();
  process.context.uc_stack.ss_size = kStackBytes;
  process.context.uc_link = nullptr;
  starting_ = self;
  makecontext(&process.context, &World::entry, 0);
  setcontext(&process.context);
}

void World::stop_before(int rank, Pending pending) {
  Process& process = processes_[rank];
  if (process.accesses_left > 0 && --process.accesses_left == 0) _longjmp(process.death, 1);
  process.pending = pending;
  if (_setjmp(process.resume) == 0) _longjmp(scheduler_, 1);
}

bool World::is_enabled(const Process& process) const {
  if (process.is_done) return false;
  switch (process.pending.access) {
    case Access::kBlocked:
      for (const Watch& watch : process.watches) {
        if (*watch.word != watch.seen) return true;
      }
      return false;
    case Access::kSleep: return !process.is_asleep || process.is_woken;
    case Access::kJoin: return num_joined_ >= static_cast<int>(process.pending.bytes);
    default: return true;
  }
}

std::vector<int> World::enabled() const {
  std::vector<int> found;
  for (int i = 0; i < num_processes_; ++i) {
    if (is_enabled(processes_[i])) found.push_back(i);
  }
  if (!scenario_.is_eager) return found;
  for (int i : found) {
    const Access access = processes_[i].pending.access;
    const bool is_data = access == Access::kReadBytes || access == Access::kWriteBytes;
    if (is_data || access == Access::kRestart || access == Access::kLoadMore) return {i};
  }
  return found;
}

uint64_t World::state_hash() const {
  uint64_t hash = 0;
  const int num_ranks = scenario_.num_ranks;
  for (int owner = 0; owner < num_ranks; ++owner) {
    for (int source = 0; source < num_ranks; ++source) {
      const uint64_t* words = &lines_[line_index(owner, source, 0)];
      for (uint32_t i = 0; i < gfc::kNumLines; ++i) hash = hash * 0x100000001b3ull + words[i];
      hash = gfc::mix(hash, source);
    }
    for (const Cell& cell : cells_[owner]) hash = hash * 0x100000001b3ull + cell.token;
    hash = gfc::mix(hash, (aborted_[owner] << 48) ^ (uint64_t{bell_[owner]} << 16) ^ parked_[owner]);
  }
  for (const Process& process : processes_) {
    const bool is_blocked = process.pending.access == Access::kBlocked;
    hash = gfc::mix(hash, process.history + process.is_done + 2 * process.is_asleep +
                              4 * process.is_woken + 8 * is_blocked +
                              16 * process.is_started);
  }
  return gfc::mix(hash, num_joined_);
}

void World::check_races() {
  for (int i = 0; i < num_processes_; ++i) {
    const Pending& a = processes_[i].pending;
    if (processes_[i].is_done || a.access != Access::kWriteBytes) continue;
    for (int j = 0; j < num_processes_; ++j) {
      const Pending& b = processes_[j].pending;
      const bool is_data = b.access == Access::kWriteBytes || b.access == Access::kReadBytes;
      if (i == j || processes_[j].is_done || !is_data || a.owner != b.owner) continue;
      if (a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes) {
        set_fault("bytes: race: " + describe(i) + " and " + describe(j));
      }
    }
  }
}

void World::set_fault(const std::string& fault) {
  if (fault_.empty()) fault_ = fault;
}

// A release joins the writer's clock into the word's; read-modify-writes keep what was there.
void World::release(int rank, Clock& into) {
  for (int i = 0; i < num_processes_; ++i) {
    into[i] = std::max(into[i], processes_[rank].clock[i]);
  }
}

void World::acquire(int rank, const Clock& from) {
  for (int i = 0; i < num_processes_; ++i) {
    processes_[rank].clock[i] = std::max(processes_[rank].clock[i], from[i]);
  }
}

// Two ranks store to each line: its source publishes, its owner restarts it. They must never meet.
void World::store(int rank, size_t index, gfc::Word word) {
  Stamp& stamp = line_stamps_[index];
  if (stamp.writer != rank && !is_ordered(rank, stamp)) {
    set_fault("a line is restarted while its source writes: rank " + std::to_string(rank));
  }
  stamp = Stamp{rank, processes_[rank].clock[rank]};
  lines_[index] = gfc::pack(word);
  line_clocks_[index] = Clock{};
}

std::string World::describe(int self) const {
  static const char* const kNames[] = {"start",      "load",        "load",    "store", "restart",
                                       "read bytes", "write bytes", "blocked", "sleep", "join"};
  const Pending& pending = processes_[self].pending;
  char text[128];
  snprintf(text, sizeof(text), "rank %d: %s arena %d +%llu..%llu", self,
           kNames[static_cast<int>(pending.access)], pending.owner,
           static_cast<unsigned long long>(pending.offset),
           static_cast<unsigned long long>(pending.offset + pending.bytes));
  return text;
}

// Goes forward from the current state until nothing new can come; returns false on a fault.
bool World::extend(uint64_t max_states) {
  for (;;) {
    if (!fault_.empty()) return false;
    const uint64_t state = state_hash();
    if (!visited_.insert(state).second) return true;
    if (visited_.size() > max_states) set_fault("the search ran out of its bound of states");
    check_races();
    std::vector<int> choices = enabled();
    if (choices.empty()) {
      for (const Process& process : processes_) {
        if (!process.is_done) set_fault("deadlock");
      }
      return fault_.empty();
    }
    frames_.push_back(Frame{path_.size(), state, std::move(choices)});
    const int choice = frames_.back().choices.back();
    frames_.back().choices.pop_back();
    step(choice);
  }
}

Result World::explore(uint64_t max_states) {
  current_ = this;
  reset();
  bool is_sound = extend(max_states);
  while (is_sound) {
    while (!frames_.empty() && frames_.back().choices.empty()) frames_.pop_back();
    if (frames_.empty()) break;
    const int choice = frames_.back().choices.back();
    frames_.back().choices.pop_back();
    const std::vector<int> replay(path_.begin(), path_.begin() + frames_.back().depth);
    path_.clear();
    reset();
    for (int process : replay) step(process);
    if (state_hash() != frames_.back().state) {
      fprintf(stderr, "the checker is broken: a replay led to another state\n");
      abort();
    }
    step(choice);
    is_sound = extend(max_states);
  }
  Result result{fault_, visited_.size(), {}};
  if (!fault_.empty()) {
    const std::vector<int> schedule = path_;
    path_.clear();
    reset();
    for (int process : schedule) {
      result.trace.push_back(describe(process));
      step(process);
    }
  }
  return result;
}

const gfc::Plan& Memory::plan() const { return world_.plan_; }

gfc::Word Memory::load_acquire(int source, uint32_t line) {
  Process& self = world_.processes_[rank_];
  // The first load of a poll is a choice; in eager mode those that follow run with it.
  const Access access = self.watches.empty() ? Access::kLoad : Access::kLoadMore;
  world_.stop_before(rank_, {access, rank_, gfc::line_offset(source, line), 8});
  const uint64_t& word = world_.line(rank_, source, line);
  self.watches.push_back({&word, word});
  world_.observe(rank_, word + 1);
  world_.acquire(rank_, world_.line_clocks_[world_.line_index(rank_, source, line)]);
  return gfc::unpack(word);
}

void Memory::restart_line(int source, uint32_t line, gfc::Word word) {
  world_.stop_before(rank_, {Access::kRestart, rank_, gfc::line_offset(source, line), 8});
  world_.store(rank_, world_.line_index(rank_, source, line), word);
  world_.observe(rank_, 2);
}

void Memory::publish(int rank, uint32_t line, gfc::Word word) {
  world_.stop_before(rank_, {Access::kStore, rank, gfc::line_offset(rank_, line), 8});
  const size_t index = world_.line_index(rank, rank_, line);
  world_.store(rank_, index, word);
  world_.release(rank_, world_.line_clocks_[index]);
  world_.observe(rank_, 3);
  if (world_.scenario_.parks) {
    Bell bell(world_, rank_, rank);
    gfc::ring(bell);
  }
}

uint64_t Memory::aborted_through() {
  if (!world_.scenario_.heeds_abort) return 0;
  world_.stop_before(rank_, {Access::kLoad, rank_, 0, 8});
  const uint64_t word = world_.aborted_[rank_];
  world_.processes_[rank_].seen_abort = word;
  world_.observe(rank_, word + 4);
  return word;
}

void Memory::write_bytes(int owner, gfc::Span span, uint64_t token) {
  world_.stop_before(rank_, {Access::kWriteBytes, owner, span.offset, span.bytes});
  const Process& self = world_.processes_[rank_];
  for (uint64_t at = span.offset; at < span.offset + span.bytes; ++at) {
    Cell& cell = world_.cells_[owner].at(world_.cell_index(at));
    if (world_.scenario_.is_eager) {
      bool is_ordered = world_.is_ordered(rank_, cell.stamp);
      for (int i = 0; i < world_.num_processes_; ++i) {
        is_ordered = is_ordered && (i == rank_ || cell.read_at[i] <= self.clock[i]);
      }
      if (!is_ordered) world_.set_fault("bytes: race: a write by rank " + std::to_string(rank_));
    }
    cell.token = token;
    cell.stamp = Stamp{rank_, self.clock[rank_]};
    cell.read_at = Clock{};
  }
  world_.observe(rank_, 5);
}

void Memory::read_bytes(int owner, gfc::Span span, uint64_t token) {
  world_.stop_before(rank_, {Access::kReadBytes, owner, span.offset, span.bytes});
  const Process& self = world_.processes_[rank_];
  for (uint64_t at = span.offset; at < span.offset + span.bytes; ++at) {
    Cell& cell = world_.cells_[owner].at(world_.cell_index(at));
    if (cell.token != token) {
      world_.set_fault("bytes: stale: rank " + std::to_string(rank_) + " read another exchange's");
    }
    if (world_.scenario_.is_eager && !world_.is_ordered(rank_, cell.stamp)) {
      world_.set_fault("bytes: race: a read by rank " + std::to_string(rank_));
    }
    cell.read_at[rank_] = self.clock[rank_];
  }
  world_.observe(rank_, 6);
}

void Memory::abort_rank(int rank, uint64_t dispatch) {
  world_.stop_before(rank_, {Access::kStore, rank, 0, 8});
  world_.aborted_[rank] = std::max(world_.aborted_[rank], dispatch);
  world_.observe(rank_, 7);
  if (world_.scenario_.parks) {
    Bell bell(world_, rank_, rank);
    gfc::ring(bell);
  }
}

void Memory::join(int num_ranks) {
  const int target = (++world_.num_joins_ - 1) / num_ranks * num_ranks + num_ranks;
  ++world_.num_joined_;
  world_.release(rank_, world_.join_clock_);
  world_.stop_before(rank_, {Access::kJoin, 0, 0, static_cast<uint64_t>(target)});
  world_.acquire(rank_, world_.join_clock_);
  world_.observe(rank_, 8);
}

void Memory::reset_arena(int rank) {
  const uint64_t start = gfc::pack(gfc::Word{0, world_.plan_.first_sequence});
  for (int source = 0; source < gfc::kMaxRanks; ++source) {
    for (uint32_t line = 0; line < gfc::kNumLines; ++line) {
      world_.line(rank, source, line) = line < gfc::kExchangeLine ? 0 : start;
    }
  }
  for (size_t i = world_.line_index(rank, 0, 0); i < world_.line_index(rank + 1, 0, 0); ++i) {
    world_.line_stamps_[i] = Stamp{};
  }
  world_.cells_[rank].fill(Cell{});
}

void Memory::run_until(int num_accesses, const std::function<void()>& part) {
  Process& self = world_.processes_[rank_];
  if (num_accesses > 0 && _setjmp(self.death) != 0) {
    world_.observe(rank_, 16);
    self.watches.clear();
    return;
  }
  self.accesses_left = num_accesses;
  part();
  self.accesses_left = 0;
}

void Memory::demand(bool holds, const char* what) {
  if (!holds) world_.set_fault("rank " + std::to_string(rank_) + ": " + what);
}

Memory::Backoff::Backoff(Memory& mem) : bell_(mem.world_, mem.rank_, mem.rank_), parking_(bell_) {
  Process& self = mem.world_.processes_[mem.rank_];
  self.mark = self.history;
  self.mark_abort = self.seen_abort;
  self.watches.clear();
}

bool Memory::pause(Backoff& backoff) {
  if (world_.scenario_.parks) return backoff.parking_.pause();
  Process& self = world_.processes_[rank_];
  self.history = self.mark + (self.seen_abort - self.mark_abort);
  if (world_.scenario_.heeds_abort) {
    self.watches.push_back({&world_.aborted_[rank_], self.seen_abort});
  }
  world_.stop_before(rank_, {Access::kBlocked, rank_, 0, 0});
  self.watches.clear();
  return world_.scenario_.heeds_abort;
}

void Memory::forget_polls() {
  Process& self = world_.processes_[rank_];
  self.history = self.mark + 17;
}

void Memory::Bell::ring() {
  world_.stop_before(rank_, {Access::kStore, owner_, 1, 8});
  ++world_.bell_[owner_];
  world_.release(rank_, world_.bell_clocks_[owner_]);
  world_.observe(rank_, 9);
}

bool Memory::Bell::is_parked() {
  world_.stop_before(rank_, {Access::kLoad, owner_, 2, 8});
  world_.observe(rank_, world_.parked_[owner_] + 10);
  return world_.parked_[owner_] != 0;
}

void Memory::Bell::add_parked(int n) {
  // Also runs in destructors of coroutines, never of abandoned ones: those are not unwound.
  world_.stop_before(rank_, {Access::kStore, owner_, 2, 8});
  world_.parked_[owner_] += static_cast<uint32_t>(n);
  world_.observe(rank_, 11);
}

uint32_t Memory::Bell::heard() {
  world_.stop_before(rank_, {Access::kLoad, owner_, 1, 8});
  world_.observe(rank_, world_.bell_[owner_] + 12);
  world_.acquire(rank_, world_.bell_clocks_[owner_]);
  return world_.bell_[owner_];
}

// As the kernel does it: compares and falls asleep in one step; only a wake ends it. Real sleeps
// also end after a while, which would hide a lost wake-up here.
void Memory::Bell::sleep(uint32_t heard) {
  Process& self = world_.processes_[rank_];
  self.is_asleep = self.is_woken = false;
  world_.stop_before(rank_, {Access::kSleep, owner_, 1, 8});
  const bool sleeps = world_.bell_[owner_] == heard;
  world_.observe(rank_, sleeps + 13);
  if (!sleeps) return;
  self.is_asleep = true;
  world_.stop_before(rank_, {Access::kSleep, owner_, 1, 8});
  self.is_asleep = self.is_woken = false;
  world_.observe(rank_, 14);
}

void Memory::Bell::wake() {
  world_.stop_before(rank_, {Access::kStore, owner_, 1, 8});
  Process& sleeper = world_.processes_[owner_];
  if (sleeper.is_asleep) sleeper.is_woken = true;
  world_.observe(rank_, 15);
}

Result explore(const Scenario& scenario, uint64_t max_states) {
  return World(scenario).explore(max_states);
}

}  // namespace check
