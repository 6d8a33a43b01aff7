"""An accelerator in host memory, for tests; torch loads it if its folder is on the path.

It is an out-of-tree backend for PrivateUse1 with an entry point of the group ``torch.backends``.
Operators run on the CPU and copy their results. Its caching allocator has blocks of 512 bytes and
counts allocated, reserved and requested bytes and their peaks; it keeps no history. With
HOSTDEVICE_COUNTERS=0 in the environment, torch finds an allocator that counts nothing.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

NAME = os.environ.get("HOSTDEVICE_NAME", "privateuseone")
LIBRARY = "HOSTDEVICE_LIBRARY"
"""Environment variable with the path of the compiled library; without it, it is built."""


def load() -> None:
    """Register the device with torch; called through the entry point."""
    import torch

    from hostdevice import device

    device.take(_native())
    torch.utils.rename_privateuse1_backend(NAME)  # also makes it the current accelerator
    torch._register_device_module(NAME, device)


def build() -> ModuleType:
    """Compile with torch's extension builder, once for each version of torch, and load."""
    import torch
    from torch.utils import cpp_extension

    version = torch.__version__.replace(".", "_").replace("+", "_")
    return cpp_extension.load(
        f"hostdevice_{version}",
        [str(Path(__file__).parent / "csrc" / "module.cpp")],
        extra_cflags=["-O1", "-g0"],
        with_cuda=False,
    )


def _native() -> ModuleType:
    known = os.environ.get(LIBRARY)
    if known is None:
        return build()
    spec = importlib.util.spec_from_file_location(Path(known).stem, known)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
