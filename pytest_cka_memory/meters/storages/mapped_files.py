"""Files that torch has mapped: their bytes count once, and not again for each tensor in them.

``torch.load(mmap=True)`` and safetensors make one storage of the file, and one of each part of it.
A part keeps the storage of the file alive.
"""

import weakref

import torch

from pytest_cka_memory.meters import torch_private


class MappedFiles:
    """The address ranges of files that are mapped."""

    def __init__(self) -> None:
        self._files: list[tuple[int, int, weakref.ref[torch.UntypedStorage]]] = []
        """The first address, the address after the last, and the storage of the file."""

    def add(self, storage: torch.UntypedStorage) -> None:
        """Remember a storage that is a whole file."""
        first = storage.data_ptr()
        live = [file for file in self._files if file[2]() is not None]
        self._files = [*live, (first, first + storage.nbytes(), weakref.ref(storage))]

    def has(self, storage: torch.UntypedStorage, tensor: torch.Tensor | None) -> bool:
        """Whether a storage, and the tensor if one was seen with it, is a part of such a file."""
        if not self._files or storage.device.type != "cpu" or _is_lazy_clone(tensor):
            return False
        address = storage.data_ptr()
        return any(
            first <= address < end and _is_another(known(), storage)
            for first, end, known in self._files
        )


def _is_another(file: torch.UntypedStorage | None, storage: torch.UntypedStorage) -> bool:
    return file is not None and file is not storage


def _is_lazy_clone(tensor: torch.Tensor | None) -> bool:
    """Whether to read the address of a tensor's data would copy the data."""
    try:
        return tensor is not None and torch_private.is_lazy_clone(tensor)
    except (NotImplementedError, RuntimeError):  # it has no storage, or only its parts have
        return False
