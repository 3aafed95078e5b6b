// Waiting without burning a core: poll briefly, yield, then sleep until a doorbell rings.
//
// With more ranks than cores a rank that only polls keeps the one it waits for off the core.
// Templated like the protocol, so that the checker searches it for lost wake-ups:
//
//   publisher: store the word (release);  bell += 1;           if parked != 0: wake all
//   waiter:    parked += 1;  heard = bell;  poll the words;    sleep while bell == heard
//
// All operations on `bell` and `parked` are sequentially consistent. If the waiter reads the bell
// before the publisher rings it, `parked` was raised before that, so the publisher sees it and
// wakes (and the kernel refuses to put a waiter to sleep whose bell has changed). If it reads the
// bell afterwards, it synchronises with the ring and its poll finds the word.
#pragma once

#include <cstdint>

namespace gfc {

// Operations of `Bell`: ring(), is_parked(), wake(); add_parked(n), heard(), sleep(heard),
// relax(poll), num_polls().
template <class Bell>
void ring(Bell& bell) {
  bell.ring();
  if (bell.is_parked()) bell.wake();
}

template <class Bell>
class Backoff {
 public:
  explicit Backoff(Bell& bell) : bell_(bell) {}
  Backoff(const Backoff&) = delete;
  Backoff& operator=(const Backoff&) = delete;
  ~Backoff() {
    if (is_announced_) bell_.add_parked(-1);
  }

  // Between two polls. True when the caller should look at its clock and at the abort word.
  bool pause() {
    if (polls_ < bell_.num_polls()) {
      bell_.relax(polls_++);
      return polls_ == bell_.num_polls();
    }
    if (!is_announced_) {
      bell_.add_parked(1);
      is_announced_ = true;
    } else {
      bell_.sleep(heard_);
    }
    heard_ = bell_.heard();  // the caller polls once more before the next pause sleeps
    return true;
  }

 private:
  Bell& bell_;
  uint32_t heard_ = 0;
  int polls_ = 0;
  bool is_announced_ = false;
};

}  // namespace gfc
