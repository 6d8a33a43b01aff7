// What a card would measure. Nothing is measured here: each value is steady, and documented in
// docs/reference/emulated_cuda.md. Programs that log a card's state require numbers.
#include "nvml.hpp"

#include <cstring>

constexpr unsigned kDegrees = 30;
static unsigned power_mw() { return (unsigned)emulated_settings()->power_watts * 100; }  // a tenth of the limit

// ---- Utilization: none ----

struct Utilization {
  unsigned gpu, memory;
};
API int nvmlDeviceGetUtilizationRates(Device device, Utilization* out) {
  if (int error = check(device, out)) return error;
  return *out = {0, 0}, kSuccess;
}
#define UTILIZATION(name) \
  API int name(Device device, unsigned* percent, unsigned* period_us) { \
    if (int error = check(device, percent)) return error; \
    if (!period_us) return kNvmlInvalid; \
    return *percent = 0, *period_us = 0, kSuccess; \
  }
UTILIZATION(nvmlDeviceGetEncoderUtilization) UTILIZATION(nvmlDeviceGetDecoderUtilization)
UTILIZATION(nvmlDeviceGetJpgUtilization) UTILIZATION(nvmlDeviceGetOfaUtilization)
API int nvmlDeviceGetPcieThroughput(Device device, int, unsigned* kib_per_second) {
  if (int error = check(device, kib_per_second)) return error;
  return *kib_per_second = 0, kSuccess;
}
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, 0)
// "Not found", which a real card answers, too, if no process has run on it since the last question.
API int nvmlDeviceGetProcessUtilization(Device device, void*, unsigned* count, unsigned long long) {
  if (int error = check(device, count)) return error;
  return *count = 0, kNvmlNotFound;
}

// ---- Temperature ----

API int nvmlDeviceGetTemperature(Device device, int sensor, unsigned* degrees) {
  if (int error = check(device, degrees)) return error;
  return sensor ? kNvmlInvalid : (*degrees = kDegrees, kSuccess);
}
struct Temperature {
  unsigned version;
  int sensor, degrees;
};
API int nvmlDeviceGetTemperatureV(Device device, Temperature* out) {
  if (int error = check(device, out)) return error;
  if (out->version != version_of(sizeof *out, 1)) return kNvmlWrongVersion;
  return out->sensor ? kNvmlInvalid : (out->degrees = kDegrees, kSuccess);
}

// ---- Power and clocks ----

NUMBER(nvmlDeviceGetPowerUsage, unsigned, power_mw())
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, 0)
NUMBER(nvmlDeviceGetPerformanceState, int, 0)
NUMBER(nvmlDeviceGetPowerState, int, 0)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 0)
extern "C" int nvmlDeviceGetMaxClockInfo(Device device, int which, unsigned* mhz);
API int nvmlDeviceGetClockInfo(Device d, int which, unsigned* mhz) { return nvmlDeviceGetMaxClockInfo(d, which, mhz); }
API int nvmlDeviceGetClock(Device d, int which, int of, unsigned* mhz) {
  constexpr int kKinds = 4;
  return of < 0 || of >= kKinds ? kNvmlInvalid : nvmlDeviceGetMaxClockInfo(d, which, mhz);
}

// ---- Errors of memory: none ----

API int nvmlDeviceGetTotalEccErrors(Device device, int, int, unsigned long long* count) {
  if (int error = check(device, count)) return error;
  return has_ecc() ? (*count = 0, kSuccess) : kNvmlNotSupported;
}
API int nvmlDeviceGetMemoryErrorCounter(Device device, int, int, int, unsigned long long* count) {
  return nvmlDeviceGetTotalEccErrors(device, 0, 0, count);
}
API int nvmlDeviceGetRemappedRows(Device device, unsigned* correctable, unsigned* uncorrectable, unsigned* pending,
                                  unsigned* failed) {
  if (int error = check(device, correctable)) return error;
  if (!uncorrectable || !pending || !failed) return kNvmlInvalid;
  if (!has_ecc() || !is_capable(8)) return kNvmlNotSupported;
  return *correctable = *uncorrectable = *pending = *failed = 0, kSuccess;
}

// ---- Values by number ----

struct FieldValue {
  unsigned field, scope;
  long long time_us, latency_us;
  unsigned type;
  int error;
  unsigned long long value;
};
static void answer_field(FieldValue& value) {
  enum { kEnergy = 83, kPowerAverage = 185, kPowerNow = 186, kLeastLimit = 187, kRequestedLimit = 192 };
  enum { kUnsigned = 1, kUnsignedLongLong = 3 };
  value.time_us = value.latency_us = 0, value.value = 0, value.error = kSuccess, value.type = kUnsigned;
  if (value.field == kEnergy) value.type = kUnsignedLongLong;
  else if (value.field == kPowerAverage || value.field == kPowerNow) value.value = power_mw();
  else if (value.field >= kLeastLimit && value.field <= kRequestedLimit)
    value.value = (unsigned long long)emulated_settings()->power_watts * 1000;
  else value.error = kNvmlNotSupported;
}
API int nvmlDeviceGetFieldValues(Device device, int count, FieldValue* values) {
  if (int error = check(device, values)) return error;
  if (count < 1) return kNvmlInvalid;
  for (int i = 0; i < count; ++i) answer_field(values[i]);
  return kSuccess;
}
