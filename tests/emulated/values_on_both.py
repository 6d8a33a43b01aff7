"""A pytest plugin that loads two emulated cards, and compares their values with the CPU's."""

import emulated_cuda

MB = 2**20
emulated_cuda.load("h100", devices=2)

import ctypes  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from emulated_cuda.values import staleness  # noqa: E402
from emulated_cuda.values.operators import tensors_in  # noqa: E402

OPERATORS_SEEN: set[str] = set()
"""Names of the operators that tests with the fixture `operators_seen` have run on the device."""


class _Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if any(tensor.is_cuda for tensor in tensors_in([args, kwargs, result])):
            OPERATORS_SEEN.add(func.name())
        return result


@pytest.fixture
def operators_seen():
    """Note the names of all operators that the test runs on the device."""
    with _Names():
        yield


@pytest.fixture(autouse=True)
def seeded(imports_excluded_from_collection):
    """Start each test with the same random numbers, and without stale values."""
    torch.manual_seed(0)
    staleness.forget()
    yield
    staleness.forget()


def launch_unknown_kernel() -> None:
    """Launch a kernel as a compiler for CUDA does, outside of torch's operators."""
    library = ctypes.CDLL("libcuda.so.1")
    function = ctypes.c_void_p()
    library.cuModuleGetFunction(ctypes.byref(function), None, b"my_kernel")
    assert library.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, None, None, None) == 0


def on_both(function, *tensors: torch.Tensor, tolerance: float = 1e-5, gradients: bool = False):
    """Assert that a function gives the same on the CPU and on the device."""
    results = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.detach().clone().to(device) for tensor in tensors]
        for leaf in leaves:
            leaf.requires_grad_(gradients and leaf.is_floating_point())
        output = function(*leaves)
        found = list(output) if isinstance(output, (tuple, list)) else [output]
        if gradients:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            total = sum(value.float().square().sum() for value in found)
            found += torch.autograd.grad(total, wanted)
        assert all(value.device.type == device for value in found)
        results.append([value.detach().cpu() for value in found])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
