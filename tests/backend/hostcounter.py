"""An independent count of CPU memory: all bytes requested from torch's allocator.

It replaces the allocator in C++, so that it also counts temporaries inside operators.
"""

import ctypes
from pathlib import Path

import torch
from torch.utils import cpp_extension


class HostCounter:
    """Counts bytes that are allocated after it has been created."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(self.build())
        for name in ("live", "peak"):
            getattr(self._library, f"hostcounter_{name}").restype = ctypes.c_int64
        self._library.hostcounter_install()

    @property
    def live_bytes(self) -> int:
        """Asked for and not given back."""
        return self._library.hostcounter_live()

    @property
    def peak_bytes(self) -> int:
        """The highest level since the last :meth:`reset_peak`."""
        return self._library.hostcounter_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the present level."""
        self._library.hostcounter_reset_peak()

    @staticmethod
    def build() -> str:
        """Compile with torch's builder, once for each version of torch; returns the path."""
        version = torch.__version__.replace(".", "_").replace("+", "_")
        name = f"hostcounter_{version}"
        source = str(Path(__file__).with_suffix(".cpp"))
        flags = ["-O1", "-g0"]
        return cpp_extension.load(
            name, [source], extra_cflags=flags, with_cuda=False, is_python_module=False
        )
