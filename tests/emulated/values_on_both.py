"""A pytest plugin that loads two emulated cards, and compares their values with the CPU's."""

from pytest_cka_memory.emulated import loading

MB = 2**20
loading.load("a100", devices=2)

import pytest  # noqa: E402
import torch  # noqa: E402

from pytest_cka_memory.emulated.values import staleness  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    """Start each test with the same random numbers, and without stale values."""
    torch.manual_seed(0)
    staleness.forget()
    yield
    staleness.forget()


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
