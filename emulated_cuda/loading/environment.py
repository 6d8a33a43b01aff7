"""Environment variables by which other libraries find the emulated device, or leave it alone."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from emulated_cuda.torch_versions import INDUCTOR_SETTINGS


def prepare(library: str) -> None:
    """Set the variables of this process and its children.

    Args:
        library: path of the emulated driver.
    """
    os.environ.setdefault("NUMBA_DISABLE_CUDA", "1")  # Numba would crash with this driver
    for name, value in INDUCTOR_SETTINGS.value.items():
        os.environ.setdefault(name, value)
    if "TRITON_LIBCUDA_PATH" not in os.environ:
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder_of_driver(library))


def folder_of_driver(library: str) -> Path:
    """Return a folder in which the library has the names of the driver that Triton links against.

    All processes of a user share one folder per library, and none removes it: a process that is
    killed could not, and others may be linking. A folder in a place where everybody may write is
    used only if nobody else can write into it; otherwise this process gets a new one.
    """
    digest = hashlib.sha256(os.fsencode(library)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"emulated-cuda-{os.getuid()}-{digest}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="emulated-cuda-"))
    for name in ("libcuda.so", "libcuda.so.1"):  # which one depends on the version of Triton
        # The target never differs: the name of the folder depends on it.
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(library)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether `folder` is a folder of this user, no link, that nobody else can write into."""
    found = folder.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not others_write
