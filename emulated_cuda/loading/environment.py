"""Environment variables by which other libraries find the emulated device, or leave it alone."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from emulated_cuda.torch_versions import INDUCTOR_SETTINGS


def prepare(library: str) -> None:
    """Set the variables of this process and its children.

    Args:
        library: path of the emulated driver.
    """
    os.environ.setdefault("NUMBA_DISABLE_CUDA", "1")  # Numba would crash with this driver
    for name, value in INDUCTOR_SETTINGS.value.items():
        os.environ.setdefault(name, value)
    if "TRITON_LIBCUDA_PATH" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="emulated-cuda-")
    for name in ("libcuda.so", "libcuda.so.1"):  # which one depends on the version of Triton
        os.symlink(library, os.path.join(folder, name))
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    process = os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
