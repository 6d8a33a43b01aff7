"""An accelerator of host memory, for tests: torch loads it where its folder is on the path.

It is an out-of-tree backend as any other: PrivateUse1, announced by the entry point
``torch.backends``. Operators are computed on the CPU and copied; its caching allocator counts
blocks of 512 bytes, a reserve, peaks and bytes asked for, and runs out of memory at a capacity.
"""

import importlib.util
import os
from pathlib import Path
from types import ModuleType

NAME = os.environ.get("HOSTDEVICE_NAME", "privateuseone")
LIBRARY = "HOSTDEVICE_LIBRARY"
"""Environment variable: the compiled library, where it is known; else it is built."""


def load() -> None:
    """Register the device with torch: the entry point."""
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
