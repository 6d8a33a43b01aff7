"""The history of blocks that an accelerator's allocator records, for PyTorch's memory viewer."""

from collections.abc import Callable
from pathlib import Path

from pytest_cka_memory.meters import torch_private

_MOST_ENTRIES = 100_000


class AllocatorHistory:
    """Records the history, unless the user does: what the user has started is never changed."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._functions = torch_private.allocator_history(device_type)
        self._is_ours = False
        self._undo: Callable[[], object] = bool

    def record(self) -> bool:
        """Start recording; return False if this allocator cannot."""
        if self._functions is None:
            return False
        if self._is_recorded():
            return True
        try:
            self._functions.record(max_entries=_MOST_ENTRIES)
        except RuntimeError:  # backend:cudaMallocAsync has the functions but cannot record
            return False
        self._is_ours = True
        self._undo = torch_private.on_history_call(self._device_type, self._leave_to_user)
        return True

    def dump(self, path: Path) -> bool:
        """Write what is recorded, by whomever; return False if nothing is."""
        if self._functions is None or not self._is_recorded():
            return False
        self._functions.dump(str(path))
        return True

    def stop(self) -> None:
        """Stop what :meth:`record` has started, unless the user has started or stopped it since."""
        self._undo()
        self._undo = bool
        if self._is_ours and self._functions is not None:
            self._is_ours = False
            self._functions.record(enabled=None)

    def _is_recorded(self) -> bool:
        return self._is_ours or torch_private.records_history(self._device_type)

    def _leave_to_user(self) -> None:
        self._is_ours = False
