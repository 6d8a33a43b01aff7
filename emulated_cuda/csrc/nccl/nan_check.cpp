// See nan_check.hpp.
#include "nan_check.hpp"

#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "../emulated.hpp"
#include "../half.hpp"
#include "collectives.hpp"

namespace {
struct E4m3 {
  uint8_t bits;
};
struct E5m2 {
  uint8_t bits;
};
bool is_nan(float value) { return std::isnan(value); }
bool is_nan(double value) { return std::isnan(value); }
bool is_nan(Half value) { return (value.bits & 0x7fff) > 0x7c00; }
bool is_nan(Bfloat value) { return (value.bits & 0x7fff) > 0x7f80; }
bool is_nan(E4m3 value) { return (value.bits & 0x7f) == 0x7f; }
bool is_nan(E5m2 value) { return (value.bits & 0x7f) > 0x7c; }

// The index of the first NaN, or `count`.
template <class T>
size_t first_nan(const void* start, size_t count) {
  size_t index = 0;
  while (index < count && !is_nan(((const T*)start)[index])) ++index;
  return index;
}

struct Check {
  const char* type;  // as an argument of the kernel's template
  size_t bytes;
  size_t (*first_nan)(const void*, size_t);
  std::atomic<const void*> function{nullptr};
};
Check checks[] = {
    {"If", 4, first_nan<float>},
    {"Id", 8, first_nan<double>},
    {"IN3c104HalfE", 2, first_nan<Half>},
    {"IN3c108BFloat16E", 2, first_nan<Bfloat>},
    {"IN3c1013Float8_e4m3fnE", 1, first_nan<E4m3>},
    {"IN3c1011Float8_e5m2E", 1, first_nan<E5m2>},
};
constexpr const char* kKernel = "checkForNaN";

const Check* check_of(const void* function) {
  for (const Check& check : checks)
    if (check.function == function) return &check;
  return nullptr;
}
}  // namespace

void remember_nan_check(const void* function, const char* name) {
  const char* found = strstr(name, kKernel);
  if (!found) return;
  for (Check& check : checks)
    if (!strncmp(found + strlen(kKernel), check.type, strlen(check.type))) check.function = function;
}
bool is_nan_check(const void* function) { return check_of(function); }

int check_for_nan(const void* function, void** arguments) {
  const Check& check = *check_of(function);
  auto start = *(const void* const*)arguments[0];
  size_t count = *(const size_t*)arguments[1];
  if (!values_are_computed || !can_be_sent(start, count * check.bytes)) return kSuccess;
  size_t index = check.first_nan(start, count);
  if (index == count) return kSuccess;
  std::string problem = "device-side assert triggered: element " + std::to_string(index) + " of " + std::to_string(count) +
                        " of a tensor to send is NaN (checked because TORCH_NCCL_NAN_CHECK is set)";
  return fail_work(problem.c_str(), kAssert);
}
