// cuFFT: plans that need no transform, and the sizes of their workspaces, which torch allocates. cuFFT cannot
// make a plan without a device. The sizes are those that cuFFT of CUDA 13.0 asked for on an H100 (torch 2.11.0),
// 795 random and regular transforms in benchmarks/results/card-h100; on other cards and versions they are the
// best known. Exact, for all that were recorded: complex transforms of one dimension whose length has no prime
// factor above 1,009; real ones of one dimension whose length has none above 127; and up to 1,024 in each of several
// dimensions. Not recorded, and concluded from these: complex lengths between 16,384 and 32,768; real lengths
// that are no powers of two, of which only nine were recorded; longer sides in several dimensions, with which the
// published reserve of a FourierFT training on an L40S (27,648 x 3,072 and less) is equal to the byte. All others are
// refused: their algorithm (Bluestein's) has workspaces of up to five times the data.
#include "library_work.hpp"

#include <map>
#include <mutex>

enum : int { kFloat = 0, kDouble = 1, kComplex = 4, kComplexDouble = 5 };  // cudaDataType_t
constexpr int kInvalidPlan = 1, kExecutionFailed = 6;                      // cufftResult_t
constexpr int kMostDimensions = 3;
constexpr const char* kAdvice =
    "The workspace of a transform of this length or type is not known without a GPU: choose a length without large "
    "prime factors, call the operator on the CPU (tensor.cpu()), or measure on a GPU.";

// ---- Workspaces ----

constexpr int64_t kLongestOfOneKernel = 16384;  // a longer transform takes several, and a copy between them
constexpr int64_t kTransposed = 65536;          // from here on a real transform takes a last coefficient more

static int64_t largest_prime(int64_t number) {
  int64_t largest = 1;
  for (int64_t factor = 2; factor * factor <= number; ++factor)
    for (; number % factor == 0; number /= factor) largest = factor;
  return number > 1 ? number : largest;
}

// Elements for each transform of a real length, from or to n / 2 + 1 complex numbers; negative if not known.
static int64_t real_elements(int64_t n, bool is_double) {
  if (largest_prime(n) > 127) return -1;
  if (n % 2) return n <= 127 ? 0 : -1;
  if (n >= kTransposed) return n / 2 + 1;
  bool is_power = !(n & (n - 1));
  int64_t longest = is_power && !is_double ? kLongestOfOneKernel : 4096;
  return n > longest || n == 500 ? n / 2 : 0;  // 250 complex numbers are transformed apart, unlike 50 and 500
}

// Complex elements of the workspace; negative if not known.
static int64_t workspace_elements(int rank, const int64_t* sizes, int64_t batch, bool is_real, bool is_double) {
  int64_t places = batch, last = sizes[rank - 1];  // of the data as complex numbers
  bool is_long = false;
  for (int i = 0; i < rank; ++i) {
    bool is_halved = is_real && i == rank - 1;
    places *= is_halved ? last / 2 + 1 : sizes[i];
    if (is_halved) continue;
    if (largest_prime(sizes[i]) > 1009) return -1;
    is_long |= sizes[i] > kLongestOfOneKernel;
  }
  if (!is_real) return is_long ? places : 0;
  int64_t of_last = real_elements(last, is_double);
  if (of_last < 0 || !is_long) return of_last < 0 ? -1 : of_last * (places / (last / 2 + 1));
  return places;
}

// ---- Plans, which are numbers ----

static std::mutex plans_lock;
static std::map<int, Stream>& plans() {
  static auto* found = new std::map<int, Stream>;  // libraries may still use it while the process ends
  return *found;
}

API int cufftCreate(int* plan) {
  static int made = 0;
  std::lock_guard<std::mutex> guard(plans_lock);
  plans()[*plan = ++made] = nullptr;
  return kSuccess;
}
API int cufftDestroy(int plan) {
  std::lock_guard<std::mutex> guard(plans_lock);
  return plans().erase(plan) ? (int)kSuccess : kInvalidPlan;
}
API int cufftSetStream(int plan, Stream stream) {
  std::lock_guard<std::mutex> guard(plans_lock);
  auto found = plans().find(plan);
  if (found == plans().end()) return kInvalidPlan;
  return found->second = stream, kSuccess;
}
NOTHING_TO_DO(cufftSetAutoAllocation) NOTHING_TO_DO(cufftSetWorkArea)

API int cufftXtMakePlanMany(int, int rank, long long* sizes, long long*, long long, long long, int input, long long*,
                            long long, long long, int output, long long batch, size_t* workspace, int) {
  auto is_complex = [](int type) { return type == kComplex || type == kComplexDouble; };
  auto is_double_type = [](int type) { return type == kDouble || type == kComplexDouble; };
  bool is_known = rank >= 1 && rank <= kMostDimensions && (is_complex(input) || input == kFloat || input == kDouble) &&
                  (is_complex(output) || output == kFloat || output == kDouble);
  int64_t lengths[kMostDimensions], elements = -1;
  if (is_known) {
    for (int i = 0; i < rank; ++i) lengths[i] = sizes[i];
    bool is_real = !is_complex(input) || !is_complex(output);
    elements = workspace_elements(rank, lengths, batch, is_real, is_double_type(input));
  }
  if (elements < 0) refuse_by_exception("cufftXtMakePlanMany", kAdvice);
  return *workspace = (size_t)(elements * (is_double_type(input) ? 16 : 8)), kSuccess;
}
API int cufftXtExec(int plan, void*, void*, int) {
  Stream stream;
  {
    std::lock_guard<std::mutex> guard(plans_lock);
    auto found = plans().find(plan);
    if (found == plans().end()) return kInvalidPlan;
    stream = found->second;
  }
  return give_library_work(stream, "cufftXtExec", "a transform of cuFFT") ? (int)kSuccess : kExecutionFailed;
}

// Ways to a plan that torch does not take; the real library does not know these plans.
RAISED(cufftMakePlan1d) RAISED(cufftMakePlan2d) RAISED(cufftMakePlan3d) RAISED(cufftMakePlanMany)
RAISED(cufftMakePlanMany64) RAISED(cufftPlan1d) RAISED(cufftPlan2d) RAISED(cufftPlan3d) RAISED(cufftPlanMany)
