"""What an accelerator's allocator has reserved, now and when it last ran out of memory."""

import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch

from pytest_cka_memory.core.reserve import PoolId, ReserveState, explain_reserve
from pytest_cka_memory.core.reserve_figures import Refusal
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator.blocks_in_use import owner_of, segments_of
from pytest_cka_memory.meters.base import RefusedAllocation
from pytest_cka_memory.meters.collector import without_collections
from pytest_cka_memory.meters.patching import Patch, SharedPatches

_numbers = count()
_before_releases: dict[int, weakref.WeakMethod[Callable[[], object]]] = {}


def before_releases(call: Callable[[], object]) -> Callable[[], object]:
    """Call `call`, a method, before the program empties the cache; return what ends this.

    Its object is not kept for it. The allocator itself empties the cache when the card is full;
    nobody is called before that.
    """
    number = next(_numbers)
    _before_releases[number] = weakref.WeakMethod(
        call, lambda _: _before_releases.pop(number, None)
    )
    return lambda: _before_releases.pop(number, None)


class Releases(SharedPatches):
    """Makes the calls of :func:`before_releases` for one type of device, while started."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        module = getattr(torch, device_type, None)
        owners = (torch.accelerator, module, getattr(module, "memory", None))
        self._owners = [owner for owner in owners if hasattr(owner, "empty_cache")]

    def make_patches(self) -> Iterator[Patch]:
        for owner in self._owners:
            yield self.patch(owner, "empty_cache", _looking_first)


def _looking_first(empty_cache: Callable[..., Any]) -> Callable[..., Any]:
    def look_and_empty(*args: Any, **kwargs: Any) -> Any:
        for method in list(_before_releases.values()):
            call = method()
            if call is not None:
                call()
        return empty_cache(*args, **kwargs)

    return look_and_empty


def reserve_of(device: torch.device) -> ReserveState | None:
    """Return what the reserve of a device consists of; None if it has no snapshot of it."""
    if not hasattr(torch.get_device_module(device), "memory_snapshot"):
        return None
    settings = torch_private.allocator_settings(device.type)
    # A snapshot makes an object for each block, so that the collector would run.
    return without_collections(
        lambda: explain_reserve(segments_of(device), settings, pool_name=_name_of)
    )


def _name_of(pool: PoolId) -> str:
    return owner_of(pool) or "a private pool"


class Refusals:
    """The last allocation of each device that was refused because memory was missing."""

    def __init__(self, device_type: str) -> None:
        self._last: dict[int, RefusedAllocation] = {}
        self.is_observed = torch_private.observe_out_of_memory(device_type, self._note)
        self._device_type = device_type

    def last(self, device: torch.device) -> RefusedAllocation | None:
        """Return that of one device; None if none was refused, or nobody knows."""
        return self._last.get(device.index or 0)

    def _note(self, index: int, requested_bytes: int, total_bytes: int, free_bytes: int) -> None:
        # An exception here would replace the error that the program gets.
        try:
            state = reserve_of(torch.device(self._device_type, index))
        except Exception:
            return
        if state is None:
            return
        before = self._last.get(index)
        refusal = Refusal(requested_bytes, free_bytes, total_bytes)
        number = 1 if before is None else before.number + 1
        self._last[index] = RefusedAllocation(number, refusal, state)


_refusals: dict[str, Refusals] = {}


def refusals_of(device_type: str) -> Refusals:
    """Return what observes the devices of a type, from now on: the allocator keeps it for ever."""
    if device_type not in _refusals:
        _refusals[device_type] = Refusals(device_type)
    return _refusals[device_type]
