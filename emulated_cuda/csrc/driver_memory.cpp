// The driver's functions for memory, copies and fills: the runtime's under other names.
#include "emulated.hpp"

#include <algorithm>

// In memory.cpp and copies.cpp.
std::pair<uintptr_t, size_t> allocation_around(const void* pointer);
int fill_elements(void* start, size_t pitch, unsigned value, int size, size_t width, size_t height, Stream stream);
extern "C" {
int cudaMalloc(void**, size_t);
int cudaMallocAsync(void**, size_t, Stream);
int cudaMallocPitch(void**, size_t*, size_t, size_t);
int cudaMallocFromPoolAsync(void**, size_t, void*, Stream);
int cudaFree(void*);
int cudaFreeAsync(void*, Stream);
int cudaHostAlloc(void**, size_t, unsigned);
int cudaFreeHost(void*);
int cudaHostRegister(void*, size_t, unsigned);
int cudaHostUnregister(void*);
int cudaMemGetInfo(size_t*, size_t*);
int cudaDeviceGetDefaultMemPool(void**, int);
int cudaDeviceGetMemPool(void**, int);
int cudaDeviceSetMemPool(int, void*);
int cudaMemPoolCreate(void**, const void*);
int cudaMemPoolDestroy(void*);
int cudaMemPoolTrimTo(void*, size_t);
int cudaMemPoolGetAttribute(void*, int, void*);
int cudaMemPoolSetAttribute(void*, int, void*);
int cudaMemcpyAsync(void*, const void*, size_t, int, Stream);
int cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, int, Stream);
int cudaMemset2DAsync(void*, size_t, int, size_t, size_t, Stream);
}

using Address = DevicePointer;

// ---- Allocation ----

DRIVER(cuMemAlloc_v2, (void** out, size_t size), size ? cudaMalloc(out, size) : kInvalidValue)
DRIVER(cuMemFree_v2, (void* start), cudaFree(start))
DRIVER(cuMemAllocAsync, (void** out, size_t size, Stream stream), size ? cudaMallocAsync(out, size, stream) : kInvalidValue)
DRIVER(cuMemAllocFromPoolAsync, (void** out, size_t size, void* pool, Stream stream),
       size ? cudaMallocFromPoolAsync(out, size, pool, stream) : kInvalidValue)
DRIVER(cuMemFreeAsync, (void* start, Stream stream), cudaFreeAsync(start, stream))
DRIVER(cuMemHostAlloc, (void** out, size_t size, unsigned flags), size ? cudaHostAlloc(out, size, flags) : kInvalidValue)
DRIVER(cuMemAllocHost_v2, (void** out, size_t size), size ? cudaHostAlloc(out, size, 0) : kInvalidValue)
DRIVER(cuMemFreeHost, (void* start), is_pinned(start) ? cudaFreeHost(start) : kInvalidValue)
DRIVER(cuMemHostRegister_v2, (void* start, size_t size, unsigned flags), cudaHostRegister(start, size, flags))
DRIVER(cuMemHostUnregister, (void* start), is_pinned(start) ? cudaHostUnregister(start) : kInvalidValue)
DRIVER(cuMemGetInfo_v2, (size_t* available, size_t* total), cudaMemGetInfo(available, total))
API int cuMemHostGetDevicePointer_v2(void** out, void* pointer, unsigned) {
  return is_pinned(pointer) ? (*out = pointer, kSuccess) : kInvalidValue;
}
API int cuMemHostGetFlags(unsigned* flags, void* pointer) {
  return is_pinned(pointer) ? (*flags = 0, kSuccess) : kInvalidValue;
}
DRIVER(cuMemAllocPitch_v2, (void** out, size_t* pitch, size_t width, size_t height, unsigned),
       width && height ? cudaMallocPitch(out, pitch, width, height) : kInvalidValue)
API int cuMemGetAddressRange_v2(Address* start, size_t* size, void* pointer) {
  auto found = allocation_around(pointer);
  if (!found.second) return kNotFound;
  if (start) *start = found.first;
  if (size) *size = found.second;
  return kSuccess;
}
API int cuMemGetAddressRange(Address* start, size_t* size, void* pointer) {  // torch before 2.10 asks for this one
  return cuMemGetAddressRange_v2(start, size, pointer);
}
// ---- Pools ----

DRIVER(cuDeviceGetDefaultMemPool, (void** pool, int device), cudaDeviceGetDefaultMemPool(pool, device))
DRIVER(cuDeviceGetMemPool, (void** pool, int device), cudaDeviceGetMemPool(pool, device))
DRIVER(cuDeviceSetMemPool, (int device, void* pool), cudaDeviceSetMemPool(device, pool))
DRIVER(cuMemPoolCreate, (void** pool, const void* wanted), cudaMemPoolCreate(pool, wanted))
DRIVER(cuMemPoolDestroy, (void* pool), cudaMemPoolDestroy(pool))
DRIVER(cuMemPoolTrimTo, (void* pool, size_t keep), cudaMemPoolTrimTo(pool, keep))
DRIVER(cuMemPoolGetAttribute, (void* pool, int which, void* value), cudaMemPoolGetAttribute(pool, which, value))
DRIVER(cuMemPoolSetAttribute, (void* pool, int which, void* value), cudaMemPoolSetAttribute(pool, which, value))
NOTHING_TO_DO(cuMemPoolSetAccess)

// ---- Copies ----

static int copy(void* to, const void* from, size_t size, Stream stream) {
  constexpr int kByAddress = 4;  // cudaMemcpyDefault
  return cudaMemcpyAsync(to, from, size, kByAddress, stream);
}
DRIVER(cuMemcpy, (void* to, const void* from, size_t size), copy(to, from, size, nullptr))
DRIVER(cuMemcpyHtoD_v2, (void* to, const void* from, size_t size), copy(to, from, size, nullptr))
DRIVER(cuMemcpyDtoH_v2, (void* to, const void* from, size_t size), copy(to, from, size, nullptr))
DRIVER(cuMemcpyDtoD_v2, (void* to, const void* from, size_t size), copy(to, from, size, nullptr))
DRIVER(cuMemcpyAsync, (void* to, const void* from, size_t size, Stream stream), copy(to, from, size, stream))
DRIVER(cuMemcpyHtoDAsync_v2, (void* to, const void* from, size_t size, Stream stream), copy(to, from, size, stream))
DRIVER(cuMemcpyDtoHAsync_v2, (void* to, const void* from, size_t size, Stream stream), copy(to, from, size, stream))
DRIVER(cuMemcpyDtoDAsync_v2, (void* to, const void* from, size_t size, Stream stream), copy(to, from, size, stream))
DRIVER(cuMemcpyPeer, (void* to, void*, const void* from, void*, size_t size), copy(to, from, size, nullptr))
DRIVER(cuMemcpyPeerAsync, (void* to, void*, const void* from, void*, size_t size, Stream stream),
       copy(to, from, size, stream))

// CUDA_MEMCPY2D
struct Side {
  size_t x_bytes, y;
  int type;
  const char *host, *device;
  void* array;
  size_t pitch;
  const char* start() const { return (type == 1 ? host : device) + y * pitch + x_bytes; }
};
struct Copy2D {
  Side from, to;
  size_t width, height;
};
static int copy_2d(const Copy2D* wanted, Stream stream) {
  constexpr int kArray = 3;
  if (wanted->from.type == kArray || wanted->to.type == kArray) return refuse_of_driver("cuArray (cuMemcpy2D)");
  return cudaMemcpy2DAsync((void*)wanted->to.start(), wanted->to.pitch, wanted->from.start(), wanted->from.pitch,
                           wanted->width, wanted->height, 4, stream);
}
DRIVER(cuMemcpy2D_v2, (const Copy2D* wanted), copy_2d(wanted, nullptr))
DRIVER(cuMemcpy2DUnaligned_v2, (const Copy2D* wanted), copy_2d(wanted, nullptr))
DRIVER(cuMemcpy2DAsync_v2, (const Copy2D* wanted, Stream stream), copy_2d(wanted, stream))

// ---- Fills: of rows of elements with 1, 2 and 4 bytes ----

#define FILL(bits, Type)                                                                                      \
  DRIVER(cuMemsetD##bits##_v2, (void* start, Type value, size_t count),                                       \
         fill_elements(start, 0, value, bits / 8, count, 1, nullptr))                                         \
  DRIVER(cuMemsetD##bits##Async, (void* start, Type value, size_t count, Stream stream),                      \
         fill_elements(start, 0, value, bits / 8, count, 1, stream))                                          \
  DRIVER(cuMemsetD2D##bits##_v2, (void* start, size_t pitch, Type value, size_t width, size_t height),        \
         fill_elements(start, pitch, value, bits / 8, width, height, nullptr))                                \
  DRIVER(cuMemsetD2D##bits##Async, (void* start, size_t pitch, Type value, size_t width, size_t height, Stream stream), \
         fill_elements(start, pitch, value, bits / 8, width, height, stream))
FILL(8, unsigned char) FILL(16, unsigned short) FILL(32, unsigned)
