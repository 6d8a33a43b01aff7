"""What an accelerator's allocator has reserved, now and when it last ran out of memory."""

import torch

from pytest_cka_memory.core.reserve import PoolId, ReserveState, explain_reserve
from pytest_cka_memory.core.reserve_figures import Refusal
from pytest_cka_memory.meters import torch_private
from pytest_cka_memory.meters.accelerator.blocks_in_use import owner_of, segments_of
from pytest_cka_memory.meters.base import RefusedAllocation
from pytest_cka_memory.meters.collector import without_collections


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
