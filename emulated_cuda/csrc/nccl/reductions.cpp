// Sums, products, extremes and averages of what several ranks show, in the order of the ranks. Half
// precision and float8 are added in single precision and rounded once; NCCL rounds at every step of its ring.
#include "reductions.hpp"

#include "../half.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>

namespace {
template <class W>
W merge(int op, W a, W b) {
  switch (op) {
    case kProd: return a * b;
    case kMax: return a != a ? a : a > b || b == b ? (a > b ? a : b) : b;
    case kMin: return a != a ? a : a < b || b == b ? (a < b ? a : b) : b;
    default: return a + b;
  }
}

template <class T>
void reduce_as(int op, double factor, const std::vector<const char*>& from, size_t count, char* out) {
  auto* to = (T*)out;
  using W = decltype(wide(T()));
  for (size_t i = 0; i < count; ++i) {
    W merged = 0;
    for (size_t rank = 0; rank < from.size(); ++rank) {
      T value;
      memcpy(&value, from[rank] + i * sizeof(T), sizeof value);
      W next = wide(value);
      if (factor != 1) next = (W)(next * factor);
      merged = rank ? merge(op, merged, next) : next;
    }
    if (op == kAvg) merged = (W)(merged / (W)from.size());
    to[i] = narrow<T, W>(merged);
  }
}

// ncclRedOpCreatePreMulSum: a sum of what is multiplied before.
std::mutex own_mutex;
std::map<int, double> own_factors;
int next_own = kFirstOwnOp;
}  // namespace

size_t width_of(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type <= kFloat8e5m2 ? widths[type] : 0;
}

double factor_of(int op) {
  std::lock_guard<std::mutex> guard(own_mutex);
  auto found = own_factors.find(op);
  return op < kFirstOwnOp || found == own_factors.end() ? 1 : found->second;
}
int add_factor(const void* scalar, int type) {
  double factor;
  switch (type) {
    case kFloat16: factor = wide(*(const Half*)scalar); break;
    case kBfloat16: factor = wide(*(const Bfloat*)scalar); break;
    case kFloat32: factor = *(const float*)scalar; break;
    case kFloat64: factor = *(const double*)scalar; break;
    default: return -1;
  }
  std::lock_guard<std::mutex> guard(own_mutex);
  own_factors[next_own] = factor;
  return next_own++;
}
void remove_factor(int op) {
  std::lock_guard<std::mutex> guard(own_mutex);
  own_factors.erase(op);
}

void reduce(int type, int op, double factor, const std::vector<const char*>& from, size_t count, char* to) {
  switch (type) {
    case kInt8: return reduce_as<int8_t>(op, factor, from, count, to);
    case kUint8: return reduce_as<uint8_t>(op, factor, from, count, to);
    case kInt32: return reduce_as<int32_t>(op, factor, from, count, to);
    case kUint32: return reduce_as<uint32_t>(op, factor, from, count, to);
    case kInt64: return reduce_as<int64_t>(op, factor, from, count, to);
    case kUint64: return reduce_as<uint64_t>(op, factor, from, count, to);
    case kFloat16: return reduce_as<Half>(op, factor, from, count, to);
    case kBfloat16: return reduce_as<Bfloat>(op, factor, from, count, to);
    case kFloat8e4m3: return reduce_as<E4m3>(op, factor, from, count, to);
    case kFloat8e5m2: return reduce_as<E5m2>(op, factor, from, count, to);
    case kFloat32: return reduce_as<float>(op, factor, from, count, to);
    case kFloat64: return reduce_as<double>(op, factor, from, count, to);
  }
}
