"""Source files: which belong to a library and not to the user, and their names in reports.

Libraries are found where they were imported from: in site-packages, in a user's site folder, or at
any other entry of ``sys.path``. A library that was not imported has no frames, so nothing is
imported here.

Reports that others read name no user, no host and no folder of this machine. Files below the root,
which is pytest's root folder, are named relative to it. Of others only what is the same on every
machine is named: the path inside site-packages or Python's library, or the name of the file.
"""

import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

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


_HOMES = ("/home", "/Users", "C:/Users")
_NOT_A_PATH = r"\s'\"`<>|:;,()\[\]{}*?"
_PATH = re.compile(
    rf"(?:file://)?(?<![\w.:/~…>)\]-])/(?![/\s])[^{_NOT_A_PATH}]+"
    rf"|(?<=:)/(?!/)[^{_NOT_A_PATH}]+"
    rf"|(?<!\w)file:///[^{_NOT_A_PATH}]+"
    rf"|(?<!\w)[A-Za-z]:[\\/][^{_NOT_A_PATH}]+"
    rf"|(?<![\w/])(?:\.\./)+[^{_NOT_A_PATH}]+"
)
"""An absolute path, or one that leaves the current folder."""
_USUAL_FOLDERS = frozenset(
    ("home", "Users", "root", "tmp", "var", "opt", "mnt", "data", "scratch", "private", "usr")
)
"""Top-level folders of other machines, from which a remote worker may report."""
_LEAST_HOST = 4
_MOST_REMEMBERED = 4096

_roots: list[Path] = []
"""The roots of this session and of those around it."""


@contextmanager
def root(folder: Path) -> Iterator[None]:
    """Name files relative to `folder` while this context is open."""
    _roots.append(folder)
    short.cache_clear()
    try:
        yield
    finally:
        _roots.remove(folder)
        short.cache_clear()


def current_root() -> Path | None:
    """Return the folder relative to which files are named; None if there is none."""
    return _roots[-1] if _roots else None


def shown(filename: str) -> str:
    """Return a file as users see it: ``Cell In[3]`` of a notebook, otherwise as :func:`short`."""
    return _cell(filename) or short(filename)


def _cell(filename: str) -> str:
    """Return a cell as IPython names it in tracebacks; empty if the code is not that of a cell.

    It is asked each time, because a cell that is run again keeps its file and gets a new number.
    """
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_ipython is None else get_ipython()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)
    return " ".join(name_of(filename) or ())


@lru_cache(maxsize=1024)
def short(filename: str) -> str:
    """Return a file as frames name it: as an editor opens it if it is the project's.

    That is ``tests/unit/test_net.py`` below the root. It is ``timm/…/resnet.py`` in site-packages,
    ``<python>/threading.py``, and elsewhere ``shop/models/net.py`` from the package on, or
    ``…/name.py`` if the file is in no package. Outside pytest there is no root, and no report: then
    it is the last folder and the name.
    """
    if not _roots or not os.path.isabs(filename):
        return "/".join(Path(filename).parts[-2:])
    name = named(filename, _roots[-1])
    parts = name.split("/")
    if parts[0] in SITE_FOLDERS:
        library, *inner = parts[1:] or parts
        return "/".join([library, *["…"][: len(inner) - 1], *inner[-1:]]) if inner else parts[-1]
    if parts[0] == "<python>":
        return f"<python>/{parts[-1]}"
    packages = _packages_of(filename) if parts[0] == "…" else []
    return "/".join([*packages, *parts[1:]]) if packages else name


def _packages_of(filename: str) -> list[str]:
    """Return the names of the packages that a file belongs to, the outermost first."""
    folder, packages = Path(filename).parent, []
    while (folder / "__init__.py").is_file() and folder.name not in ("", _user()):
        packages.append(folder.name)
        folder = folder.parent
    return packages[::-1]


def named(path: str, root: Path) -> str:
    """Return the part of a path that anyone may read; `root` is where a relative path starts."""
    of_windows = PureWindowsPath(path)
    full = path if of_windows.drive else os.path.normpath(root / path)
    pure = of_windows if of_windows.drive else PurePosixPath(full)
    for folder in SITE_FOLDERS:
        if folder in pure.parts:
            return "/".join(pure.parts[pure.parts.index(folder) :])
    for start, name in ((str(root), ""), (_STANDARD_LIBRARY, "<python>/")):
        if full == start:
            return name.rstrip("/") or "."
        if full.startswith(f"{start}{os.sep}"):
            return f"{name}{full[len(start) + 1 :]}".replace(os.sep, "/")
    is_home = pure.parent.as_posix() in _HOMES or full == os.path.expanduser("~")
    return "~" if is_home else f"…/{pure.name}" if _user() not in pure.name else "…"


@lru_cache(maxsize=8)
def anonymizer(root: Path) -> Callable[[str], str]:
    """Return a function that replaces paths and the name of this machine in a text."""
    prefixes = [
        (f"{start}{end}", name)
        for start, name in ((str(root), ""), (os.path.expanduser("~"), "~/"))
        if " " in start  # the pattern of paths ends at a space
        for end in (os.sep,)
    ]
    hosts = re.compile("|".join(rf"(?<![\w.-]){re.escape(host)}(?![\w-])" for host in _hosts()))

    def replaced(match: re.Match[str]) -> str:
        path = match[0].removeprefix("file://")
        return named(path, root) if _is_of_a_machine(path) else match[0]

    @lru_cache(maxsize=_MOST_REMEMBERED)
    def change(text: str) -> str:
        for start, name in prefixes:
            text = text.replace(start, name)
        if "/" in text or "\\" in text:
            text = _PATH.sub(replaced, text)
        return hosts.sub("<host>", text) if hosts.pattern else text

    return change


def in_plain_values(value: Any, change: Callable[[str], str]) -> Any:
    """Return builtin values with every text in them changed, also the keys of dicts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(k)): in_plain_values(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(in_plain_values(item, change) for item in value)
    return value


def _is_of_a_machine(path: str) -> bool:
    """Whether a path begins in a folder of this machine, unlike the route of a web page."""
    first = path.partition("/")[2].partition("/")[0] if path.startswith("/") else ""
    return not path.startswith("/") or first in _USUAL_FOLDERS or os.path.isdir(f"/{first}")


def _user() -> str:
    """Return the name of the user; a text that no file has if it is unknown or a general name."""
    name = os.environ.get("USER") or os.environ.get("LOGNAME") or os.environ.get("USERNAME") or ""
    return name if len(name) > 2 and name != "root" else "/"


def _hosts() -> list[str]:
    """Return the names of this machine, and of torchrun's first, that are not ordinary words."""
    full = [platform.node(), os.environ.get("MASTER_ADDR", "")]
    names = {*full, *(name.partition(".")[0] for name in full)}
    local = ("127.0.0.1", "0.0.0.0")
    return sorted(
        (
            name
            for name in names
            if len(name) >= _LEAST_HOST and re.search(r"[\d.-]", name) and name not in local
        ),
        key=len,
        reverse=True,
    )
