"""Fixtures for tests of the accelerator meter, on a GPU and on an emulated device.

No kernel runs on the emulated device, so no test here looks at computed values.
"""

from collections.abc import Callable, Iterator

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.accelerator.by_blocks import AcceleratorBlockMeter


@pytest.fixture(autouse=True, scope="module")
def _fast_collections(imports_excluded_from_collection: None) -> None:
    """Apply to every test of this folder."""


@pytest.fixture
def probe() -> MemoryProbe:
    """Return a probe for the accelerator."""
    return MemoryProbe("auto")


@pytest.fixture
def cuda(probe: MemoryProbe) -> torch.device:
    """Return the CUDA device; skip on another accelerator, which lacks functions of torch.cuda."""
    if probe.device.type != "cuda":
        pytest.skip(f"uses functions of torch.cuda; the accelerator is {probe.device}")
    return probe.device


@pytest.fixture
def native(probe: MemoryProbe) -> MemoryProbe:
    """Return the probe; skip if blocks cannot be counted in the device's allocator here."""
    if not isinstance(probe.meter, AcceleratorBlockMeter):
        pytest.skip("blocks of this allocator cannot be counted natively")
    return probe


@pytest.fixture
def second_device(probe: MemoryProbe) -> torch.device:
    """Return the accelerator with index 1; skip if there is none."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("requires two devices; --cka-memory-device=emulate:cuda,devices=2 has two")
    return torch.device(probe.device.type, 1)


@pytest.fixture
def allocate(probe: MemoryProbe) -> Callable[..., torch.Tensor]:
    """Return a function that allocates a tensor of so many bytes, and nothing else."""

    def allocate(size: int, device: torch.device = probe.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)

    return allocate


@pytest.fixture
def network(probe: MemoryProbe) -> torch.nn.Module:
    """Return a convolution, a normalisation and a linear layer, in training mode."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(inplace=True),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 10),
    ).to(probe.device)


@pytest.fixture
def limit_reserve(cuda: torch.device) -> Iterator[Callable[[int], None]]:
    """Return a function that lets the reserve grow by so many bytes; afterwards it has no limit."""
    total = torch.cuda.get_device_properties(cuda).total_memory

    def limit(more_bytes: int) -> None:
        torch.cuda.empty_cache()
        limit_bytes = torch.cuda.memory_reserved(cuda) + more_bytes
        # Half a byte more, because torch rounds the product with the total down.
        torch.cuda.set_per_process_memory_fraction((limit_bytes + 0.5) / total, cuda)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)


@pytest.fixture
def expandable_segments(cuda: torch.device) -> Iterator[None]:
    """Let the allocator map memory page by page, into segments that can grow."""
    new_name = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # not in torch 2.9
    set_allocator = new_name or torch.cuda.memory._set_allocator_settings
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:False")


@pytest.fixture(params=["native", "expandable"])
def segments(request: pytest.FixtureRequest) -> str:
    """Run the test with both kinds of segments of the allocator."""
    if request.param == "expandable":
        request.getfixturevalue("expandable_segments")
    return request.param
