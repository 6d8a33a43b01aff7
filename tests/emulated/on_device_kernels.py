"""Tests of kernels that the user wrote in CUDA: none is read in silence as if it had run.

``test_on_device.py`` runs them in a new process with the plugin ``values_on_both``.
"""

import ctypes

import pytest
import torch
from torch.utils import cpp_extension

from emulated_cuda.errors import StaleValueError
from emulated_cuda.values import staleness

# ---- Kernels ----


class Sizes(ctypes.Structure):
    """``dim3`` of CUDA."""

    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


def launch_from_host_code(values: torch.Tensor) -> None:
    """Call what host code that nvcc has compiled calls."""
    launch = ctypes.CDLL("libcuda.so.1").cudaLaunchKernel
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    launch.argtypes = (pointer, Sizes, Sizes, pointer, size, pointer)
    assert launch(1, Sizes(1, 1, 1), Sizes(8, 1, 1), None, 0, None) == 0


@pytest.mark.parametrize("way", ["compiled", "templated", "host"])
def test_kernel_of_the_user_is_noticed_and_named(way, tmp_path, monkeypatch):
    """A user's kernel is noticed and named, if PyTorch compiles it or host code launches it."""
    if way == "compiled":
        if cpp_extension.CUDA_HOME is None:  # PyTorch asks for a toolkit, but reads nothing of it
            monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
        source = 'extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1; }'
        kernel = torch.cuda._compile_kernel(source, "add_one")
        launch, name = lambda x: kernel((1, 1, 1), (8, 1, 1), (x,)), "add_one"
    elif way == "templated":
        source = "template <typename T> T twice(T x) { return x * 2; }"
        launch, name = torch.cuda.jiterator._create_jit_fn(source), "twice"
    else:
        launch, name = launch_from_host_code, "a kernel whose name is not known"
    values = torch.ones(8, device="cuda")
    result = launch(values)
    for tensor in (values, *([] if result is None else [result])):
        problem = (
            f"the kernel .*{name}.* was launched outside .* write the kernel in Triton, or use"
        )
        with pytest.raises(StaleValueError, match=problem):
            tensor.cpu()


def test_host_code_of_the_user_that_copies_and_fills_is_computed():
    """``cudaMemcpy`` and ``cudaMemset`` in a user's host code are no kernels, so they run."""
    library = ctypes.CDLL("libcuda.so.1")
    values, host = torch.ones(4, device="cuda"), torch.arange(4.0)
    address = ctypes.c_void_p(values.data_ptr())
    assert library.cudaMemset(address, 0, ctypes.c_size_t(8)) == 0
    assert values.tolist() == [0, 0, 1, 1]
    source = ctypes.c_void_p(host.data_ptr())
    assert library.cudaMemcpy(address, source, ctypes.c_size_t(16), 1) == 0
    assert (values * 2).tolist() == [0, 2, 4, 6]


def test_kernel_that_only_waits_leaves_values_known():
    """A kernel that only waits, as tests of streams use it, leaves values known."""
    values = torch.ones(2, device="cuda")
    torch.cuda._sleep(10)
    assert values.tolist() == [1, 1]
    assert not staleness.is_possible()
