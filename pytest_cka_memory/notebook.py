"""Functions without a probe: the two of the original notebook for any device, and laws."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.measure import law_processes
from pytest_cka_memory.measure.loaders_and_steps import length_of
from pytest_cka_memory.measure.probe import MemoryProbe


def measure_memory_retention(
    func: Callable[[], Any], device: str | None = None
) -> tuple[Any, float, float]:
    """Measure the peak of `func` and what it retains.

    As in the notebook, the peak includes memory that was live before, and the result is live when
    retained memory is read. Unlike there, old memory that `func` frees cannot hide new memory that
    it retains.

    Args:
        func: called once, without arguments.
        device: as ``--cka-memory-device`` takes it; None for the accelerator if there is one.

    Returns:
        ``(result, peak_mb, retained_mb)``: what `func` has returned, the highest level in it, and
        what was allocated in it and is live, in MB (2**20 bytes).

    Raises:
        DeviceError: if the device is unknown or not available.

    Example:
        >>> import torch
        >>> result, peak_mb, retained_mb = measure_memory_retention(
        ...     lambda: torch.ones(2**18), device="cpu"
        ... )
        >>> retained_mb
        1.0
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

    Args:
        func: called with a model and a loader.
        model_fn: makes a model.
        dataloader: batches.
        batch_counts: how many batches `func` gets, for each call.
        device: as ``--cka-memory-device`` takes it; None for the accelerator if there is one.

    Returns:
        MB (2**20 bytes) for each of `batch_counts`.

    Raises:
        DeviceError: if the device is unknown or not available.
        ValueError: if a count is below 1, or the loader has fewer batches than its length says.

    Example:
        >>> import torch
        >>> measure_memory_at_batch_counts(
        ...     lambda model, loader: [model(batch) for batch in loader],
        ...     lambda: torch.nn.Linear(4, 2**17, bias=False),
        ...     torch.ones(3, 2, 4).unbind(),
        ...     (1, 3),
        ...     device="cpu",
        ... )
        [0.0, 0.0]
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


def law(
    step: Callable[..., Any] | str,
    *,
    law_of: str = "peak",
    card: str | None = None,
    device: str | None = None,
    **sizes: Any,
) -> Law:
    """Return how the peak of a step, or another figure, grows with its sizes.

    Given by name, the step runs in a process of its own on an emulated card without values, so this
    works where torch is loaded already, such as in a notebook.

    Args:
        step: ``"FILE.py:FUNCTION"`` or ``"MODULE:FUNCTION"``; a function is measured in this
            process, on the accelerator if there is one, unless `device` is an emulated one.
        law_of: as for :meth:`MemoryProbe.law`.
        card: the name of a card.
        device: instead of it, any device as ``--cka-memory-device`` takes it.
        **sizes: as for :meth:`MemoryProbe.law`.

    Raises:
        DeviceError: if the card or device is unknown or not available.
        RegionError: if there is no such step, it does not use the card, runs out of its memory, or
            raises an exception that is not one of Python's own. Those of Python are raised here,
            with the traceback of the other process as their cause.
        TypeError: if the step does not take a size, or an argument cannot be passed on.
        ValueError: if no size varies, or a function cannot be found by another process.

    Example:
        .. code-block:: python

            found = law("train.py:step", batch=(1, 2, 4), seq=(128, 256, 512), card="h100")
            print(found, found.largest("batch", card="t4", seq=1024))
    """
    target = law_processes.target_of(step, card, device)
    if target is not None:
        return law_processes.find_law(target, law_of, sizes)
    return MemoryProbe().law(step, law_of=law_of, card=card, device=device, **sizes)
