"""The two functions of the original notebook, under the same names, for any device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_cka_memory.measure.loaders import length_of
from pytest_cka_memory.measure.probe import MemoryProbe


def measure_memory_retention(
    func: Callable[[], Any], device: str | None = None
) -> tuple[Any, float, float]:
    """Measure what `func` retains: return ``(result, peak_mb, retained_mb)``; 1 MB is 2**20 bytes.

    As in the notebook, the peak includes memory that was live before, and the result is live when
    retained memory is read. Unlike there, old memory that `func` frees cannot hide new memory that
    it retains.

    Raises:
        DeviceError: if the device is unknown or not available.
    """
    region = MemoryProbe(device).run(func)
    return region.result, region.peak_mb, region.retained_mb


def measure_memory_at_batch_counts(
    func: Callable[[Any, Any], Any],
    model_fn: Callable[[], Any],
    dataloader: Iterable[Any],
    batch_counts: Sequence[int],
    device: str | None = None,
) -> list[float]:
    """Return the memory in MB that ``func(model, loader)`` retains, for each number of batches.

    Each count gets a fresh ``model_fn()``, moved to the device and in eval mode, and a loader of
    that many batches. As in the notebook, larger counts are reduced to the length of `dataloader`.
    1 MB is 2**20 bytes.

    Raises:
        DeviceError: if the device is unknown or not available.
        ValueError: if a count is below 1, or the loader has fewer batches than its length says.
    """
    probe = MemoryProbe(device)
    available = length_of(dataloader)
    counts = [n if available is None else min(n, available) for n in batch_counts]
    retained = {
        count: probe.sweep(
            func, dataloader, (count,), setup=lambda: model_fn().to(probe.device).eval()
        ).retained_mb[0]
        for count in counts
    }
    return [retained[count] for count in counts]
