"""Which source files belong to the plugin, torch, pytest or the interpreter, and not to the user.

Libraries are found where they were imported from: in site-packages, in a user's site folder, or at
any other entry of ``sys.path``. A library that was not imported has no frames, so nothing is
imported here.
"""

import os
import sys
from pathlib import Path

import emulated_cuda
import pytest_cka_memory

OWN_FOLDERS = tuple(
    f"{Path(file).parent}{os.sep}" for file in (pytest_cka_memory.__file__, emulated_cuda.__file__)
)
"""Starts of the names of the plugin's own files, and of the emulated device's."""
_TORCH = ("torch", "functorch", "torchgen")
"""The packages of torch's distribution, which are installed into one folder."""
_RUNNERS = ("_pytest", "pluggy", "IPython", "ipykernel")
"""The packages that call a test or a cell of a notebook."""
_GENERATED = ("<frozen", "<string>", "<eval_with_key>")
_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_CALLERS = tuple(os.path.join(_STANDARD_LIBRARY, name, "") for name in ("asyncio", "unittest"))
"""Folders of Python's library whose code only calls the user's: event loops and test runners."""
_MOST_FILES = 4096
SITE_FOLDERS = ("site-packages", "dist-packages")
"""The names of the folders into which packages are installed."""
_PASSING_ON = (f"safetensors{os.sep}", "typing_extensions.py")
"""Packages whose code only passes calls on to torch: what a user has written is further out."""


def foreign_prefixes() -> tuple[str, ...]:
    """Return the start of the names of files whose frames are never shown."""
    beside = [Path(folder).parent for folder in _folders_of("torch")]
    of_torch = (f"{folder / name}{os.sep}" for folder in beside for name in _TORCH)
    return (*OWN_FOLDERS, *of_torch, *_CALLERS, *_GENERATED)


def runner_folders() -> tuple[str, ...]:
    """Return the start of the names of files of pytest and IPython; what called them is left out.

    They call every test and every cell of a notebook.
    """
    return tuple(f"{folder}{os.sep}" for name in _RUNNERS for folder in _folders_of(name))


def is_foreign(filename: str) -> bool:
    """Whether a file is not the user's: it belongs to the plugin, torch or the interpreter."""
    return is_foreign_file[filename]


def is_of_python(filename: str) -> bool:
    """Whether a file belongs to Python's library: not to what is installed in a folder below it."""
    return filename.startswith(f"{_STANDARD_LIBRARY}{os.sep}") and not is_of_package(filename)


def explains_little(filename: str) -> bool:
    """Whether a file stands between the user's code and torch without a part in what happens."""
    return is_of_python(filename) or any(
        f"{os.sep}{folder}{os.sep}{name}" in filename
        for folder in SITE_FOLDERS
        for name in _PASSING_ON
    )


def is_of_package(filename: str) -> bool:
    """Whether a file belongs to an installed package, in whichever site folder that is.

    A virtual environment may see more than its own, for example with ``--system-site-packages``.
    """
    return any(f"{os.sep}{name}{os.sep}" in filename for name in SITE_FOLDERS)


def is_installed(filename: str) -> bool:
    """Whether a file belongs to Python's library or to an installed package."""
    return is_of_package(filename) or is_of_python(filename)


class _ForeignFiles(dict[str, bool]):
    """A cache of `is_foreign`: a dict, because a function call per frame would be too slow."""

    def __missing__(self, filename: str) -> bool:
        if len(self) >= _MOST_FILES:  # generated code may have a new file name each time
            self.clear()
        foreign = self[filename] = filename.startswith(foreign_prefixes())
        return foreign


is_foreign_file = _ForeignFiles()
"""File name -> whether it is foreign."""


def _folders_of(package: str) -> list[str]:
    return list(getattr(sys.modules.get(package), "__path__", ()))
