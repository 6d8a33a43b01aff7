// Shared by the files of NVML. It is a library of its own, because torch and pynvml look for
// libnvidia-ml.so.1. It counts physical devices, because NVML ignores CUDA_VISIBLE_DEVICES.
#pragma once

#include "../emulated.hpp"

extern "C" int emulated_physical_devices();
extern "C" const Settings* emulated_settings();
extern "C" void emulated_uuid(int physical, char* text, size_t size);
extern "C" int emulated_processes(int physical, unsigned* processes, uint64_t* bytes, int most);

constexpr int kNvmlUninitialized = 1, kNvmlInvalid = 2, kNvmlNotSupported = 3, kNvmlNotFound = 6,
              kNvmlTooSmall = 7, kNvmlWrongVersion = 25;

using Device = void*;  // the address of one of `handles`
extern char handles[kMostDevices];
inline int index_of(Device device) { return (int)((char*)device - handles); }
bool is_initialized();
// An error if the library is not initialized, the device is not one, or an output is null.
int check(Device device, const void* out = handles);

// Writes a text; an error if it does not fit.
int put_text(char* text, unsigned size, const char* value);

// The first member of a versioned structure has its size and version.
constexpr unsigned version_of(size_t size, unsigned version) { return (unsigned)size | version << 24; }

// What kind of card it is, of which NVML's facts follow.
inline bool has_ecc() { return emulated_settings()->name[7] != 'G'; }  // all but "NVIDIA GeForce"
inline bool is_capable(int major, int minor = 0) {
  const Settings& card = *emulated_settings();
  return card.major * 10 + card.minor >= major * 10 + minor;
}

// A function that answers a question about a device with one number.
#define NUMBER(name, type, value) \
  API int name(Device device, type* out) { \
    if (int error = check(device, out)) return error; \
    return *out = (type)(value), kSuccess; \
  }
// The same for a question that only some cards can answer; `has` says whether this one does.
#define NUMBER_IF(has, name, type, value) \
  API int name(Device device, type* out) { \
    if (int error = check(device, out)) return error; \
    if (!(has)) return kNvmlNotSupported; \
    return *out = (type)(value), kSuccess; \
  }
