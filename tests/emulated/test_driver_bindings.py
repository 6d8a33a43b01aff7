"""Memory by the functions of the driver and the runtime: pools, pointers and fills."""

from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("cuda") is None, reason="cuda.bindings is not installed")

BEGIN = """
import ctypes
import emulated_cuda
emulated_cuda.load("h100", devices=2)
from cuda.bindings import __version__, driver, runtime
PARAMETERS = [None] if int(__version__.partition(".")[0]) >= 13 else []

def call(function, *arguments):
    code, *results = function(*arguments)
    assert int(code) == 0, (function, code)
    return results[0] if len(results) == 1 else tuple(results)

def read(pointer, size):
    host = (ctypes.c_char * size)()
    call(driver.cuMemcpyDtoH, ctypes.addressof(host), pointer, size)
    return host.raw

call(driver.cuInit, 0)
MB = 2**20
"""

POOLS = """
attributes = runtime.cudaMemPoolAttr

def get(pool, name):
    return int(call(runtime.cudaMemPoolGetAttribute, pool, getattr(attributes, name)))

def properties(device=0, most=0):
    found = runtime.cudaMemPoolProps()
    found.allocType = runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    found.location.type = runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    found.location.id, found.maxSize = device, most
    return found

pool = call(runtime.cudaMemPoolCreate, properties(most=64 * MB))
for name in ("ReuseFollowEventDependencies", "AttrReleaseThreshold"):
    value = driver.cuuint64_t(9) if name.startswith("Attr") else 0
    attribute = getattr(attributes, "cudaMemPool" + name)
    call(runtime.cudaMemPoolSetAttribute, pool, attribute, value)
    print(get(pool, "cudaMemPool" + name))
free = call(runtime.cudaMemGetInfo)[0]
first = call(runtime.cudaMallocFromPoolAsync, 40 * MB, pool, 0)
used, reserved = (get(pool, f"cudaMemPoolAttr{name}Current") for name in ("UsedMem", "ReservedMem"))
print(used // MB, reserved // MB, (free - call(runtime.cudaMemGetInfo)[0]) // MB)
print(runtime.cudaMallocFromPoolAsync(40 * MB, pool, 0)[0].name)

# cudaMallocAsync takes memory of the device's pool; destroyed, it ends with its last memory
call(runtime.cudaDeviceSetMemPool, 0, pool)
second = call(runtime.cudaMallocAsync, 2 * MB, 0)
print(get(pool, "cudaMemPoolAttrUsedMemCurrent") // MB)
call(runtime.cudaMemPoolDestroy, pool)
print(int(call(runtime.cudaDeviceGetMemPool, 0)) != int(pool))
call(runtime.cudaFreeAsync, first, 0)
print((free - call(runtime.cudaMemGetInfo)[0]) // MB)
call(runtime.cudaFreeAsync, second, 0)
print((free - call(runtime.cudaMemGetInfo)[0]) // MB)

# what is wrong: a destroyed pool, a default one, and that of another device
default = call(runtime.cudaDeviceGetDefaultMemPool, 0)
other = call(runtime.cudaDeviceGetDefaultMemPool, 1)
print([code.name for code, *_ in (
    runtime.cudaMemPoolDestroy(pool), runtime.cudaMemPoolDestroy(default),
    runtime.cudaDeviceSetMemPool(0, other), runtime.cudaMemPoolCreate(properties(device=2)),
)])
"""

POINTERS = """
def get(name, pointer):
    attribute = getattr(driver.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + name)
    return call(driver.cuPointerGetAttribute, attribute, pointer)

pointer = call(driver.cuMemAlloc, 4096)
inside = driver.CUdeviceptr(int(pointer) + 100)
print(int(get("RANGE_START_ADDR", inside)) == int(pointer), get("RANGE_SIZE", inside))
print(int(get("CONTEXT", pointer)) == int(call(driver.cuCtxGetCurrent)), get("MAPPED", pointer))
context = call(driver.cuCtxCreate, *PARAMETERS, 0, 0)
second = call(driver.cuMemAlloc, 4096)
ids = {get("BUFFER_ID", pointer), get("BUFFER_ID", second)}
print(int(get("CONTEXT", second)) == int(context), len(ids))
pool = call(runtime.cudaDeviceGetDefaultMemPool, 0)
pooled = call(runtime.cudaMallocAsync, 4096, 0)
print(int(get("MEMPOOL_HANDLE", pooled)) == int(pool), int(get("MEMPOOL_HANDLE", pointer)))
SYNCHRONOUS = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
call(driver.cuPointerSetAttribute, 1, SYNCHRONOUS, pointer)
print(get("SYNC_MEMOPS", pointer), get("SYNC_MEMOPS", second))
asked = [getattr(driver.CUpointer_attribute, "CU_POINTER_ATTRIBUTE_" + name)
         for name in ("MEMORY_TYPE", "DEVICE_ORDINAL", "RANGE_SIZE")]
print([int(value) for value in call(driver.cuPointerGetAttributes, 3, asked, pointer)])
unknown = driver.CUdeviceptr(12345)
# Version 12 of cuda.bindings gives the ordinal without its sign.
values = map(int, call(driver.cuPointerGetAttributes, 3, asked, unknown))
print([value - 2**32 if value >= 2**31 else value for value in values])
"""

FILLS = """
block = call(runtime.cudaMalloc3D, runtime.make_cudaExtent(100, 3, 2))
print(block.pitch)
call(runtime.cudaMemset, block.ptr, 0, 6 * 512)
call(runtime.cudaMemset3D, block, 7, runtime.make_cudaExtent(2, 2, 2))
found = read(block.ptr, 6 * 512)
print([found[row * 512] for row in range(6)], found[:3].hex())
call(driver.cuMemsetD2D32, block.ptr, 512, 1, 2, 2)
print(read(block.ptr + 512, 8).hex())

# nothing is written beyond an allocation, whatever the size of its elements and rows
end = driver.CUdeviceptr(int(call(driver.cuMemAlloc, 2 * MB)) + 2 * MB - 4)
print([code.name for code, in (
    driver.cuMemsetD8(end, 1, 8), driver.cuMemsetD32(end, 1, 2), driver.cuMemsetD32(end, 1, 2**62),
    driver.cuMemsetD2D8(end, 4096, 1, 4, 2), driver.cuMemsetD32(end, 1, 1),
    driver.cuMemsetD2D8(end, 4096, 1, 0, 2**62),
)])
"""

LATE = """
import torch
import emulated_cuda
emulated_cuda.load("h100")
from cuda.bindings import runtime
code, pointer = runtime.cudaMalloc(2**20)
print(int(code), int(runtime.cudaMemset(pointer, 1, 2**20)[0]), runtime.cudaGetDeviceCount()[1])
print(torch.ones(3, device="cuda").sum().item())
"""


def test_pools_that_a_program_creates(python):
    """A pool has attributes, a limit and memory of its own, which is free when it has ended."""
    run = python("-c", BEGIN + POOLS, forked=True)
    assert run.stdout.splitlines() == [
        "0",
        "9",
        "40 64 64",
        "cudaErrorMemoryAllocation",
        "42",
        "True",
        "64",
        "0",
        str(["cudaErrorInvalidValue"] * 3 + ["cudaErrorInvalidDevice"]),
    ], run.stderr


def test_attributes_of_pointers(python):
    """The driver knows where an allocation begins, how large it is, and whose it is."""
    run = python("-c", BEGIN + POINTERS, forked=True)
    assert run.stdout.splitlines() == [
        "True 4096",
        "True True",
        "True 2",
        "True 0",
        "True False",
        "[2, 0, 4096]",
        "[0, -2, 0]",
    ], run.stderr


def test_fills_write_their_rows_and_nothing_else(python):
    """Fills of two and three dimensions leave what is between rows, and stay in an allocation."""
    run = python("-c", BEGIN + FILLS, forked=True)
    wrong, right = "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS"
    assert run.stdout.splitlines() == [
        "512",
        "[7, 7, 0, 7, 7, 0] 070700",
        "0100000001000000",
        str([wrong] * 4 + [right] * 2),
    ], run.stderr


@pytest.mark.emulates
def test_runtime_of_bindings_is_replaced_after_the_import_of_torch(python):
    """PyTorch imports ``cuda.bindings``, whose modules have each other's addresses by then."""
    run = python("-c", LATE, forked=True)
    assert run.stdout.splitlines() == ["0 0 1", "3.0"], run.stderr
