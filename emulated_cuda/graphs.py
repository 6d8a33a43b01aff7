"""CUDA graphs, which are refused before torch begins to capture one.

The library refuses ``cudaStreamBeginCapture``, but before torch calls it, torch changes the current
stream. Up to torch 2.12 it also changes the pools of the allocator, so that ``empty_cache`` would
free nothing, and up to 2.11 the state of the generators, so that every ``randn`` and ``dropout``
would raise until the process ends.
"""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn


def refuse_captures(path: str) -> None:
    """Let ``torch.cuda.graph`` and ``CUDAGraph.capture_begin`` raise an error that says what to do.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    import torch

    from emulated_cuda import torch_private

    library = ctypes.CDLL(path)
    library.cudaGetErrorString.restype = ctypes.c_char_p

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        error = library.cudaStreamBeginCapture()
        library.cudaGetLastError()  # otherwise the next call on the device would raise it
        text = library.cudaGetErrorString(error).decode()
        raise torch.AcceleratorError(f"CUDA error: {text}")

    torch_private.replace_captures(refuse)
