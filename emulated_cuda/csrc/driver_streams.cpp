// The driver's functions for streams, events and graphs: the runtime's under other names.
#include "emulated.hpp"

extern "C" {
int cudaStreamCreateWithPriority(Stream*, unsigned, int);
int cudaStreamDestroy(Stream);
int cudaStreamQuery(Stream);
int cudaStreamSynchronize(Stream);
int cudaStreamGetPriority(Stream, int*);
int cudaStreamGetFlags(Stream, unsigned*);
int cudaStreamGetId(Stream, unsigned long long*);
int cudaStreamGetDevice(Stream, int*);
int cudaStreamWaitEvent(Stream, void*);
int cudaStreamAddCallback(Stream, void (*)(Stream, int, void*), void*, unsigned);
int cudaLaunchHostFunc(Stream, void (*)(void*), void*);
int cudaDeviceGetStreamPriorityRange(int*, int*);
int cudaStreamBeginCapture(Stream, int);
int cudaStreamEndCapture(Stream, void**);
int cudaStreamGetCaptureInfo(Stream, int*, unsigned long long*);
int cudaThreadExchangeStreamCaptureMode(int*);
int cudaEventCreateWithFlags(void**, unsigned);
int cudaEventDestroy(void*);
int cudaEventRecord(void*, Stream);
int cudaEventQuery(void*);
int cudaEventSynchronize(void*);
int cudaEventElapsedTime(float*, void*, void*);
int cudaGraphInstantiateWithFlags(void**, void*, unsigned long long);
int cudaGraphLaunch(void*, Stream);
int cudaGraphDestroy(void*);
int cudaGraphExecDestroy(void*);
int cudaGraphDebugDotPrint(const void*, const char*, unsigned);
}

// ---- Streams ----

DRIVER(cuStreamCreate, (Stream* stream, unsigned flags), cudaStreamCreateWithPriority(stream, flags, 0))
DRIVER(cuStreamCreateWithPriority, (Stream* stream, unsigned flags, int priority),
       cudaStreamCreateWithPriority(stream, flags, priority))
DRIVER(cuStreamDestroy_v2, (Stream stream), (uintptr_t)stream < 16 ? kInvalidHandle : cudaStreamDestroy(stream))
DRIVER(cuStreamDestroy, (Stream stream), cuStreamDestroy_v2(stream))
DRIVER(cuStreamQuery, (Stream stream), cudaStreamQuery(stream))
DRIVER(cuStreamSynchronize, (Stream stream), cudaStreamSynchronize(stream))
DRIVER(cuStreamGetPriority, (Stream stream, int* priority), cudaStreamGetPriority(stream, priority))
DRIVER(cuStreamGetFlags, (Stream stream, unsigned* flags), cudaStreamGetFlags(stream, flags))
DRIVER(cuStreamGetId, (Stream stream, unsigned long long* id), cudaStreamGetId(stream, id))
DRIVER(cuStreamGetDevice, (Stream stream, int* device), cudaStreamGetDevice(stream, device))
DRIVER(cuCtxGetStreamPriorityRange, (int* least, int* greatest), cudaDeviceGetStreamPriorityRange(least, greatest))
DRIVER(cuStreamWaitEvent, (Stream stream, void* event, unsigned),
       event ? cudaStreamWaitEvent(stream, event) : kInvalidHandle)
DRIVER(cuStreamAddCallback, (Stream stream, void (*function)(Stream, int, void*), void* data, unsigned flags),
       cudaStreamAddCallback(stream, function, data, flags))
DRIVER(cuLaunchHostFunc, (Stream stream, void (*function)(void*), void* data),
       cudaLaunchHostFunc(stream, function, data))

// ---- Events ----

DRIVER(cuEventCreate, (void** event, unsigned flags), cudaEventCreateWithFlags(event, flags))
DRIVER(cuEventDestroy_v2, (void* event), event ? cudaEventDestroy(event) : kInvalidHandle)
DRIVER(cuEventRecord, (void* event, Stream stream), event ? cudaEventRecord(event, stream) : kInvalidHandle)
DRIVER(cuEventRecordWithFlags, (void* event, Stream stream, unsigned),
       event ? cudaEventRecord(event, stream) : kInvalidHandle)
DRIVER(cuEventQuery, (void* event), event ? cudaEventQuery(event) : kInvalidHandle)
DRIVER(cuEventSynchronize, (void* event), event ? cudaEventSynchronize(event) : kInvalidHandle)
DRIVER(cuEventElapsedTime, (float* milliseconds, void* start, void* end),
       start && end ? cudaEventElapsedTime(milliseconds, start, end) : kInvalidHandle)
DRIVER(cuEventElapsedTime_v2, (float* milliseconds, void* start, void* end), cuEventElapsedTime(milliseconds, start, end))

// ---- Graphs, which are captured from streams ----

DRIVER(cuStreamBeginCapture_v2, (Stream stream, int mode), cudaStreamBeginCapture(stream, mode))
DRIVER(cuStreamEndCapture, (Stream stream, void** graph), cudaStreamEndCapture(stream, graph))
DRIVER(cuThreadExchangeStreamCaptureMode, (int* mode), cudaThreadExchangeStreamCaptureMode(mode))
DRIVER(cuGraphInstantiateWithFlags, (void** exec, void* graph, unsigned long long flags),
       cudaGraphInstantiateWithFlags(exec, graph, flags))
DRIVER(cuGraphLaunch, (void* exec, Stream stream), cudaGraphLaunch(exec, stream))
DRIVER(cuGraphDestroy, (void* graph), cudaGraphDestroy(graph))
DRIVER(cuGraphExecDestroy, (void* exec), cudaGraphExecDestroy(exec))
DRIVER(cuGraphDebugDotPrint, (const void* graph, const char* path, unsigned flags),
       cudaGraphDebugDotPrint(graph, path, flags))
