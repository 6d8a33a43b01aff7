// Declarations shared by the files of this library, which takes the place of the CUDA runtime.
//
// The types and constants are those of CUDA's binary interface, as far as this library reads or
// fills them. They are declared here so that neither CUDA's headers nor torch are needed to
// compile, and so that one binary serves the CUDA 12 and CUDA 13 builds of torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
// A function that succeeds and has nothing to do, whatever its arguments are.
#define NOTHING_TO_DO(name) \
  API int name() { return kSuccess; }

// ---- CUDA's interface ----

using Stream = void*;
using DevicePointer = uintptr_t;

enum : int {  // the same numbers in the runtime (cudaError_t) and in the driver (CUresult)
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidConfiguration = 9,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kFileNotFound = 301,
  kOperatingSystem = 304,
  kNotFound = 500,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kAssert = 710,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kMisalignedAddress = 716,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kInvalidResourceConfiguration = 915,
};

struct Dim3 {
  unsigned x, y, z;
};

// ---- Settings ----

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr int kMostDevices = 16;
constexpr size_t kGranularity = 2 * kMiB;  // the driver's unit of physical memory
constexpr size_t kPitch = 512;             // between rows of pitched memory

// The card, and how many there are. `_Settings` in loading/library.py has the same fields.
struct Settings {
  char name[256];
  int64_t major, minor, multiprocessors, total_bytes, context_bytes;
  int64_t address_bytes;  // of the address space that is reserved for a device
  int64_t shared_per_block, shared_per_block_opt_in, shared_per_multiprocessor, l2_bytes;
  int64_t threads_per_multiprocessor, blocks_per_multiprocessor;
  int64_t clock_khz, memory_clock_khz, memory_bus_bits;
  int64_t power_watts, pci_device;  // of NVML: its limit of power, the number of its kind on the PCI bus
  int64_t devices;       // before CUDA_VISIBLE_DEVICES
  int64_t cuda_version;  // of torch's build: 13020 for 13.2
  int64_t nccl_version;  // of torch's build: 22907 for 2.29.7
};
extern Settings settings;

// ---- State shared between files ----

extern thread_local int current_device;
extern thread_local int last_error;
inline int fail(int error) { return last_error = error; }
// The driver's functions return errors, and do not leave them for cudaGetLastError.
class KeepLastError {
 public:
  ~KeepLastError() { last_error = before_; }

 private:
  int before_ = last_error;
};
// Whether cuInit was called, which the runtime does where it is first used.
extern std::atomic<bool> driver_is_ready;
inline void make_driver_ready() { driver_is_ready.store(true, std::memory_order_relaxed); }
// Defines a function of the driver that returns what an expression of the runtime does.
#define DRIVER(name, parameters, expression)                 \
  API int name parameters {                                  \
    KeepLastError keep_last_error;                           \
    return driver_is_ready ? (expression) : kNotInitialized; \
  }

// Indices of the physical devices that CUDA_VISIBLE_DEVICES leaves, in its order.
const std::vector<int>& visible_devices();
inline int device_count() { return (int)visible_devices().size(); }
inline bool is_device(int device) { return device >= 0 && device < device_count(); }
// The driver's error for a device, if any.
inline int check_device(int device) {
  return !driver_is_ready ? kNotInitialized : is_device(device) ? kSuccess : kInvalidDevice;
}

// Guards every table of memory below.
extern std::mutex memory_mutex;
// Counts `bytes` more as taken from a device; false if the card is full. Hold the mutex.
bool take_bytes(int device, size_t bytes);
void give_bytes(int device, size_t bytes);
size_t bytes_in_use(int device);
// Tells NVML of all processes what a device of this one has in use; `is_use` if the process now has a
// context there. Hold the mutex (in_use.cpp).
void tell_nvml(int device, bool is_use);
// Address space of a device; an address in it is device memory. Hold the mutex.
void add_range(uintptr_t start, size_t size);
void remove_range(uintptr_t start);
void add_piece(uintptr_t start, size_t size, int device);
void remove_pieces(uintptr_t start, size_t size);
void* current_context();                 // of this thread: a CUcontext
bool is_on_device(const void* pointer);  // takes the mutex
bool is_pinned(const void* pointer);     // likewise
// False if bytes are of a device and not allocated there as a whole. Takes the mutex.
bool may_access(const void* pointer, size_t size);
// Whether addresses are in the address space of a device. Hold the mutex.
bool is_in_range(uintptr_t start, size_t size);

inline size_t round_up(size_t size, size_t step) { return (size + step - 1) / step * step; }

// Counts work for a device: launches, products, copies. Nothing is executed, so no time passes on the
// device; the times of events are computed from this number.
void count_work();
uint64_t work_counted();

// ---- Values, which Python computes after each operator (values.cpp) ----

// What this thread is doing, if values are computed.
enum Phase : int {
  kNoOperator,   // no operator of torch runs
  kOperator,     // in an operator: what it would write on the device is computed afterwards
  kCopyOperator  // in an operator that only copies: it writes nothing, the copy is made afterwards
};
extern std::atomic<int> values_are_computed;
// Whether the host wrote these bytes of a device, and no kernel ran since; and that it did (copies.cpp).
extern std::atomic<uint64_t> launches;
bool is_known(const void* start, size_t size);
void note_write(const void* start, size_t size, uint64_t after_launches = launches);
void forget_writes(const void* start, size_t size);
Phase phase();
// Records work that was launched outside an operator: what it would have written is not computed.
void note_work(const char* name);
uint64_t unknown_work_counted();
// Answers an operator's read with the next number that Python has announced; false if there is none.
bool answer(void* to, size_t size);

// ---- Refusals ----

// Records that `function` is not supported and why; returns kNotSupported. The text is what
// cudaGetErrorString and cuGetErrorString then return in this thread.
int refuse(const char* function, const char* advice);
// The same for a function that is in no other file; the last error of the runtime stays as it is.
int refuse_of_driver(const char* function);
// Records why work has failed after it was given; returns the code, whose text is then this problem.
int fail_work(const char* problem, int code = kLaunchFailed);
const char* refusal_text();
// Sets name and text of an error of the driver; kInvalidValue if there is none with this number.
int driver_error_texts(int error, const char** name, const char** text);
// For libraries whose codes torch turns into fixed texts: raises a RuntimeError in Python.
[[noreturn]] void refuse_by_exception(const char* function, const char* advice);
#define RAISED(name) \
  API int name() { refuse_by_exception(#name, kAdvice); }
