// Runs all scenarios; prints one line per case and fails if a verdict is not the expected one.
#include <chrono>
#include <cstdio>
#include <cstring>

#include "scenarios.h"

namespace check {

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  add_real_cases(cases);
  add_variant_cases(cases);
  add_fault_cases(cases);
  return cases;
}

}  // namespace check

int main(int argc, char** argv) {
  const char* filter = argc > 1 ? argv[1] : "";
  int num_wrong = 0;
  for (const check::Case& entry : check::all_cases()) {
    if (strstr(entry.name, filter) == nullptr) continue;
    const auto start = std::chrono::steady_clock::now();
    const check::Result result = check::explore(entry.scenario);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const bool is_expected = entry.is_safe ? result.fault.empty()
                                           : result.fault.find(entry.fault) != std::string::npos &&
                                                 !result.fault.empty();
    printf("%s | %s | %s | %s | %llu states | %.2f s\n", is_expected ? "as expected" : "WRONG",
           entry.is_safe ? "safe" : "broken", entry.name,
           result.fault.empty() ? "all interleavings right" : result.fault.c_str(),
           static_cast<unsigned long long>(result.states), taken.count());
    fflush(stdout);
    if (is_expected) continue;
    ++num_wrong;
    for (const std::string& step : result.trace) printf("    %s\n", step.c_str());
  }
  return num_wrong == 0 ? 0 : 1;
}
