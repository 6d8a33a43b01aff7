"""The counters that an accelerator's allocator keeps, and the threads that hold its tensors."""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from emulated_cuda import threads
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import torch_private

_LONGEST_WAIT_SECONDS = 1


def wait_for_backward(device: torch.device) -> None:
    """Wait until `device`'s thread holds nothing of earlier backward passes, for 1 s at most.

    When a backward pass fails, its caller gets the exception at once, while the thread still
    references it, and with it every frame of the traceback and their tensors. The thread drops that
    reference when it next gets the GIL: within about 1 ms, but possibly after a reading.

    To wait, it runs a backward pass over an empty tensor in the queue of that thread. Neither the
    pass nor its tensors allocate memory.
    """
    # Inside a backward pass, waiting for its thread would be a deadlock. The threads must not be
    # started here: once they run, a forked child process cannot run backward passes.
    is_inside = torch_private.graph_task_id() != -1
    if is_inside or not threads.may_exist(torch_private.BACKWARD_THREAD):
        return
    # In a new thread: no dispatch mode is active there, and its node is the last in the queue.
    waiting = threading.Thread(target=_run_empty_pass, args=(device,), daemon=True)
    waiting.start()
    waiting.join(_LONGEST_WAIT_SECONDS)


def _run_empty_pass(device: torch.device) -> None:
    with suppress(RuntimeError):  # a device that cannot run this is measured without it
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.view(0), leaf, torch.empty(0, device=device))


_NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_CANNOT = (RuntimeError, AssertionError, ValueError)  # what torch raises about devices


class NoCountersError(DeviceError):
    """The device's allocator has no counters; the message says so."""


class Levels(NamedTuple):
    """What is live and reserved now, in bytes."""

    allocated: int
    """Of whole blocks."""
    requested: int
    """Of what was asked for; that of blocks if the allocator does not count it."""
    reserved: int


class AllocatorStats:
    """Reads the counters of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nested: Callable[[int], Mapping[str, Any]] | None = None

    def all(self) -> dict[str, int]:
        """Return all counters, as ``torch.accelerator.memory_stats`` does."""
        return torch.accelerator.memory_stats(self._device)

    def check(self) -> None:
        """Find out whether the device can be used, and what it allocates can be counted.

        Raises:
            DeviceError: if no tensor can be allocated on it.
            NoCountersError: if its allocator counts nothing.
        """
        try:
            torch.empty(1, device=self._device)  # the counters exist after the first allocation
        except _CANNOT as error:
            raise DeviceError(f"{self._device} cannot be measured: {error}") from error
        missing = f"{self._device} has no memory counters in torch {torch.__version__}"
        try:
            peak = self.all().get("allocated_bytes.all.peak")
        except _CANNOT as error:  # NotImplementedError too
            raise NoCountersError(missing) from error
        if peak is None:
            raise NoCountersError(missing)
        if peak:
            return
        if os.environ.get(_NO_CACHING):
            raise DeviceError(
                f"{self._device} cannot be measured: its allocator counts nothing; if "
                f"{_NO_CACHING} is set, unset it"
            )
        raise NoCountersError(f"{missing}: they stay at 0")

    def check_reset(self) -> None:
        """Find out whether the device's peaks can be reset, as its only counters require.

        Raises:
            NoCountersError: if they cannot.
        """
        try:
            torch.accelerator.reset_peak_memory_stats(self._device)
        except _CANNOT as error:
            raise NoCountersError(
                f"{self._device} has no peaks that torch {torch.__version__} can reset"
            ) from error

    def levels(self) -> Levels:
        """Return the levels now."""
        return self._flat_levels() if self._nested is None else self._nested_levels(self._nested)

    def read_fast(self) -> None:
        """From now on read levels in a tenth of the time, if this torch version allows it."""
        self._nested = torch_private.device_stats()

    def _flat_levels(self) -> Levels:
        stats = self.all()
        allocated = stats["allocated_bytes.all.current"]
        counts_requested = stats.get("requested_bytes.all.allocated")
        requested = stats["requested_bytes.all.current"] if counts_requested else allocated
        return Levels(allocated, requested, stats["reserved_bytes.all.current"])

    def _nested_levels(self, nested: Callable[[int], Mapping[str, Any]]) -> Levels:
        """Return the levels without sorting a hundred other counters."""
        stats = nested(self._device.index)
        allocated: int = stats["allocated_bytes"]["all"]["current"]
        requested = stats["requested_bytes"]["all"]
        return Levels(
            allocated,
            requested["current"] if requested["allocated"] else allocated,
            stats["reserved_bytes"]["all"]["current"],
        )


def device_name(device: torch.device) -> str:
    """Return the model of a device; its type if the backend does not name it."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name(device.index)) if name is not None else device.type
