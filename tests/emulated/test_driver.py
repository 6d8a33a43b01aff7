"""The driver's own interface: what others look up by name, ``cuda.bindings`` and green contexts."""

import json
from importlib.metadata import version
from importlib.util import find_spec

import pytest

ENTRY_POINTS = """
import ctypes, json
import emulated_cuda
emulated_cuda.load("h100")
cuda = ctypes.CDLL("libcuda.so.1")

def entry_point(name, version):
    function = ctypes.c_void_p()
    found = ctypes.c_int()
    flags, at, result = ctypes.c_uint64(), ctypes.byref(function), ctypes.byref(found)
    code = cuda.cuGetProcAddress_v2(name, at, version, flags, result)
    return code, function.value, found.value

def address(name):
    return ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value

count = ctypes.c_int(-1)
before = cuda.cuDeviceGetCount(ctypes.byref(count)), count.value
cuda.cuInit(0)
after = cuda.cuDeviceGetCount(ctypes.byref(count)), count.value
text = ctypes.c_char_p()
refused = cuda.cuTexObjectCreate(None, None, None, None)
cuda.cuGetErrorString(refused, ctypes.byref(text))
name = ctypes.c_char_p()
cuda.cuGetErrorName(2, ctypes.byref(name))
pointer = ctypes.c_uint64()
print(json.dumps({
    "before": before,
    "after": after,
    "newest": entry_point(b"cuMemAlloc", 12000)[1] == address("cuMemAlloc_v2"),
    "old": entry_point(b"cuCtxGetDevice", 12080)[1] == address("cuCtxGetDevice"),
    "new": entry_point(b"cuCtxGetDevice", 13000)[1] == address("cuCtxGetDevice_v2"),
    "unknown": entry_point(b"cuNoSuchFunction", 13000),
    "of_library": entry_point(b"memcpy", 13000)[0],
    "refused": [refused, text.value.decode()],
    "error": name.value.decode(),
    "no_bytes": cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(0)),
    "last_error": cuda.cudaGetLastError(),
}))
"""


def test_functions_are_found_by_name_and_version(python):
    """A name leads to the newest form that a version knows; an unknown one to an error.

    A function that is not emulated returns an error that names it. Errors of the driver are not
    kept for the runtime, where torch would take them for its own.
    """
    run = python("-c", ENTRY_POINTS)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["before"] == [3, -1]  # CUDA_ERROR_NOT_INITIALIZED: cuInit comes first
    assert found["after"] == [0, 1]
    assert found["newest"]
    assert found["old"]
    assert found["new"]
    assert found["unknown"] == [500, None, 1]
    assert found["of_library"] == 500
    assert found["refused"] == [
        801,
        "cuTexObjectCreate is not supported by the emulated device, because there is no GPU. "
        "Textures, surfaces and arrays are not emulated: use linear memory.",
    ]
    assert (found["error"], found["no_bytes"]) == ("CUDA_ERROR_OUT_OF_MEMORY", 1)
    assert found["last_error"] == 0


BINDINGS = """
import ctypes
import emulated_cuda
emulated_cuda.load("h100", devices=2)
from cuda.bindings import __version__, driver, runtime
PARAMETERS = [None] if int(__version__.partition(".")[0]) >= 13 else []

def call(function, *arguments):
    code, *results = function(*arguments)
    assert int(code) == 0, (function, code)
    return results[0] if len(results) == 1 else tuple(results)

call(driver.cuInit, 0)
print(call(driver.cuDeviceGetCount), call(runtime.cudaGetDeviceCount))
print(call(driver.cuDeviceGetName, 40, 0).split(b"\\0")[0].decode())
print(call(driver.cuGetErrorName, driver.CUresult.CUDA_SUCCESS))

# memory: allocate, copy, fill, ask for the range, free
free = call(driver.cuMemGetInfo)[0]
pointer = call(driver.cuMemAlloc, 4 << 20)
print(free - call(driver.cuMemGetInfo)[0], call(driver.cuMemGetAddressRange, pointer)[1])
call(driver.cuMemsetD32, pointer, 0x01020304, 4)
host = bytearray(16)
to = (ctypes.c_char * 16).from_buffer(host)
call(driver.cuMemcpyDtoH, ctypes.addressof(to), pointer, 16)
print(host[:5].hex())
call(runtime.cudaMemset, int(pointer), 7, 16)
by_address = runtime.cudaMemcpyKind.cudaMemcpyDefault
call(runtime.cudaMemcpy, ctypes.addressof(to), int(pointer), 16, by_address)
print(host[:2].hex())
call(driver.cuMemFree, pointer)
print(call(driver.cuMemGetInfo)[0] == free, driver.cuMemFree(pointer)[0].name)

# contexts are a stack, and take memory
first = call(driver.cuDevicePrimaryCtxRetain, 1)
call(driver.cuCtxPushCurrent, first)
print(int(call(driver.cuCtxGetDevice)), call(runtime.cudaGetDevice))
call(driver.cuCtxPopCurrent)
print(int(call(driver.cuCtxGetDevice)))
context = call(driver.cuCtxCreate, *PARAMETERS, 0, 0)
print(free - call(driver.cuMemGetInfo)[0])
print(int(call(driver.cuCtxGetCurrent)) == int(context))
call(driver.cuCtxDestroy, context)
print(driver.cuCtxSetCurrent(context)[0].name)

# streams and events
stream = call(driver.cuStreamCreate, 1)
event = call(driver.cuEventCreate, 0)
call(driver.cuEventRecord, event, stream)
call(driver.cuStreamSynchronize, stream)
print(call(driver.cuStreamGetFlags, stream), driver.cuEventQuery(event)[0].name)
call(driver.cuStreamDestroy, stream)

# wrong arguments: no image, no file, no kernel, and memory that is registered already
print(driver.cuModuleLoadDataEx(0, 0, [], [])[0].name, driver.cuModuleLoad(b"none")[0].name)
print(driver.cuKernelGetName(0)[0].name, driver.cuModuleUnload(0)[0].name)
pages = (ctypes.c_char * 400)()
at = ctypes.addressof(pages)
print([int(runtime.cudaHostRegister(at + start, 160, 3)[0]) for start in (0, 80, 160)])
print([int(runtime.cudaHostUnregister(at + start)[0]) for start in (80, 0, 160, 160)])

# what is not emulated is refused by name
code, *_ = driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
print(call(driver.cuGetErrorString, code).decode())
code, *_ = driver.cuGraphCreate(0)
print(code.name, call(driver.cuGetErrorString, code).decode())
code, *_ = runtime.cudaMallocManaged(64, 1)
print(code.name)
"""


@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda.bindings is not installed")
def test_cuda_bindings_use_the_device(python):
    """The driver and the runtime of ``cuda.bindings`` are the emulated ones, without torch."""
    run = python("-c", BINDINGS)
    assert run.stdout.splitlines() == [
        "2 2",
        "NVIDIA H100 80GB HBM3",
        "b'CUDA_SUCCESS'",
        f"{4 << 20} {4 << 20}",
        "0403020104",
        "0707",
        "True CUDA_ERROR_INVALID_VALUE",
        "1 1",
        "0",
        f"{512 << 20}",
        "True",
        "CUDA_ERROR_INVALID_CONTEXT",
        "1 CUDA_SUCCESS",
        "CUDA_ERROR_INVALID_VALUE CUDA_ERROR_FILE_NOT_FOUND",
        "CUDA_ERROR_INVALID_VALUE CUDA_ERROR_INVALID_HANDLE",
        "[0, 712, 0]",
        "[1, 0, 0, 713]",
        "A launch of a kernel without torch is not supported by the emulated device, because there "
        "is no GPU. Import torch first for kernels of Triton; kernels of your own are not "
        "computed.",
        "CUDA_ERROR_NOT_SUPPORTED cuGraphCreate is not supported by the emulated device, because "
        "there is no GPU. Capture the graph from a stream: nodes added by hand and changes of a "
        "graph are not emulated.",
        "cudaErrorNotSupported",
    ], run.stderr
    assert run.stderr == ""


DUMP = """
import sys
import emulated_cuda
emulated_cuda.load("h100")
import torch
x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(keep_graph=True)
graph.enable_debug_mode()
with torch.cuda.graph(graph):
    (x + 1).mul_(2)
graph.debug_dump(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.emulates
@pytest.mark.skipif(find_spec("cuda") is None, reason="cuda.bindings is not installed")
def test_debug_dump_has_a_node_for_each_piece_of_work(python, tmp_path):
    """``CUDAGraph.debug_dump`` writes a file for Graphviz, with the nodes in their order."""
    # A new interpreter: the names of kernels are known if torch is imported after the device.
    run = python("-c", DUMP, str(tmp_path / "graph.dot"))
    assert run.returncode == 0, run.stderr
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph dot {")
    assert text.count("[label=") == 2
    assert text.count("->") == 1


GREEN = """
import warnings
warnings.simplefilter("ignore")
import emulated_cuda
emulated_cuda.load("h100")
import torch
from torch.cuda.green_contexts import GreenContext
from cuda.bindings import driver
context = GreenContext.create(num_sms=12, device_id=0)
context.set_context()
current = driver.cuCtxGetCurrent()[1]
sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
print(driver.cuCtxGetDevResource(current, sm)[1].sm.smCount)
print(torch.ones(4, device="cuda").sum().item())
context.pop_context()
print(driver.cuDeviceGetDevResource(0, sm)[1].sm.smCount)
with torch.cuda.stream(context.Stream()):
    print((torch.ones(4, device="cuda") + 1).sum().item())
try:
    GreenContext.create(num_sms=133, device_id=0)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(
    tuple(map(int, version("torch").split(".")[:2])) < (2, 11) or find_spec("cuda") is None,
    reason="before torch 2.11 there are no green contexts with streams",
)
def test_green_context_has_its_multiprocessors(python):
    """A green context has the number that was asked for, rounded up to a multiple of 8."""
    run = python("-c", GREEN, forked=True)
    assert run.stdout.splitlines() == [
        "16",
        "4.0",
        "132",
        "8.0",
        "Invalid number of SMs requested for green context: 133 (device has 132 SMs)",
    ], run.stderr


BENCHMARK = """
import emulated_cuda
emulated_cuda.load("h100")
import torch
torch.backends.cudnn.benchmark = True
print(torch.nn.Conv2d(3, 8, 3).cuda()(torch.ones(2, 3, 8, 8, device="cuda")).shape[1])
"""


@pytest.mark.slow
def test_cudnn_finds_all_functions_that_it_looks_up(python):
    """With cuDNN's benchmark mode nothing is printed: cuDNN prints each function it misses."""
    run = python("-c", BENCHMARK, forked=True)
    assert (run.stdout, run.stderr) == ("8\n", "")
