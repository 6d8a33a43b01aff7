"""An accelerator in host memory, for tests; torch loads it if its folder is on the path.

It is an out-of-tree backend for PrivateUse1 with an entry point of the group ``torch.backends``.
Operators run on the CPU and copy their results. Its caching allocator has blocks of 512 bytes and
counts allocated, reserved and requested bytes and their peaks; it keeps no history. With
HOSTDEVICE_COUNTERS=0 in the environment, torch finds an allocator that counts nothing.
"""

import ctypes
import os
from pathlib import Path

NAME = os.environ.get("HOSTDEVICE_NAME", "privateuseone")
LIBRARY = "HOSTDEVICE_LIBRARY"
"""Environment variable with the path of the compiled library; without it, it is built."""


def load() -> None:
    """Register the device with torch; called through the entry point."""
    import torch

    from hostdevice import device

    library = ctypes.CDLL(os.environ.get(LIBRARY) or build())
    library.hostdevice_register()
    device.take(library)
    torch.utils.rename_privateuse1_backend(NAME)  # also makes it the current accelerator
    torch._register_device_module(NAME, device)


def build() -> str:
    """Compile with torch's extension builder, once for each version of torch; returns the path."""
    import torch
    from torch.utils import cpp_extension

    version = torch.__version__.replace(".", "_").replace("+", "_")
    return cpp_extension.load(
        f"hostdevice_{version}",
        [str(Path(__file__).parent / "csrc" / "module.cpp")],
        extra_cflags=["-O0", "-g0"],
        with_cuda=False,
        is_python_module=False,
    )
