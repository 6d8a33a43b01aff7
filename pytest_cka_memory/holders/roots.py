"""Everything that a program can name: module globals, locals of running frames, context variables.

No user code runs here: reading an attribute of a lazily loaded module would load it.
"""

import contextvars
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_cka_memory.core.libraries import is_installed
from pytest_cka_memory.core.places import shown

CO_OPTIMIZED = 0x1
"""Flag of code whose locals are stored in slots: its ``f_locals`` is a copy."""

_OWN_REFERENCES = 3
_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"]


@dataclass(frozen=True)
class Root:
    """Values by name from which a search starts, and how to write these names."""

    prefix: str
    """Text before a name: ``net.`` for a module's globals, empty for a frame's locals."""
    suffix: str
    """Text after an expression: `` in train (loop.py:12)`` for a frame's locals."""
    names: Mapping[str, Any]
    is_library: bool = False
    """Whether the names belong to installed code, which users rarely type."""
    function: str = ""
    """The function of this thread whose locals these are; empty for other names."""

    @property
    def label(self) -> str:
        """What the names belong to: ``module net``, or ``a variable in train (loop.py:12)``."""
        if self.prefix:
            return f"module {self.prefix.removesuffix('.')}"
        if self.suffix.startswith(" in "):
            return f"a variable{self.suffix}"
        if self.suffix.startswith(" ("):
            return self.suffix.strip(" ()")
        return self.suffix.lstrip(", ") or "the interpreter"


def locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's locals, without leaving a copy in the frame that keeps them alive."""
    live = frame.f_locals
    found = dict(live)
    # Before Python 3.13 a frame caches the dict that it returns, and with it every local's value.
    # If something else references the dict, the user got it from locals(), so it is not cleared.
    is_copy = type(live) is dict and frame.f_code.co_flags & CO_OPTIMIZED
    if is_copy and sys.getrefcount(live) <= _OWN_REFERENCES:
        live.clear()
    return found


def modules() -> dict[str, types.ModuleType]:
    """Return every imported module; entries of other types are left out."""
    imported = list(sys.modules.items())
    return {name: it for name, it in imported if issubclass(type(it), types.ModuleType)}


def globals_of(module: types.ModuleType) -> dict[str, Any]:
    """Return what ``vars(module)`` returns, without loading a lazily loaded module."""
    found: dict[str, Any] = _MODULE_DICT.__get__(module)
    return found


def module_roots() -> Iterator[Root]:
    """Yield the globals of every imported module."""
    for name, module in modules().items():
        names = dict(globals_of(module))
        file = names.get("__file__")
        installed = type(file) is not str or is_installed(file)
        yield Root(f"{name}.", "", names, installed and name != "__main__")


def frame_roots(is_own: Callable[[str], bool]) -> Iterator[Root]:
    """Yield the locals of every running frame, of all threads, innermost first."""
    known = {id(globals_of(module)) for module in modules().values()}
    stacks = sys._current_frames()
    # This generator's own frame is replaced by its caller's: its locals would hold it, and through
    # it the locals of all its callers.
    stacks[threading.get_ident()] = sys._getframe(1)
    for thread, top in stacks.items():
        frame: types.FrameType | None = top
        while frame is not None:
            yield from _roots_of(frame, is_own, known, thread == threading.get_ident())
            frame = frame.f_back


def traceback_roots(error: BaseException, is_own: Callable[[str], bool]) -> Iterator[Root]:
    """Yield the locals of the frames of a traceback, which have ended, innermost first."""
    known = {id(globals_of(module)) for module in modules().values()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield from _roots_of(frame, is_own, known, is_of_this_thread=True)


def _roots_of(
    frame: types.FrameType,
    is_own: Callable[[str], bool],
    known: set[int],
    is_of_this_thread: bool,
) -> Iterator[Root]:
    code, outside = frame.f_code, frame.f_globals
    if is_own(code.co_filename):
        return
    where = f" in {code.co_name} ({shown(code.co_filename)}:{frame.f_lineno})"
    is_library = is_installed(code.co_filename)
    if code.co_flags & CO_OPTIMIZED:
        function = code.co_name if is_of_this_thread else ""
        yield Root("", where, locals_of(frame), is_library, function)
    if id(outside) not in known:  # code run by exec() belongs to no module
        known.add(id(outside))
        yield Root("", f", a global{where}", dict(outside), is_library)


def context_root() -> Root:
    """Return the context variables of this thread."""
    found = contextvars.copy_context().items()
    return Root("", " (a context variable)", {f"{var.name}.get()": value for var, value in found})


def signal_root() -> Root:
    """Return the functions that handle signals, which only C code references."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    names = {f"signal.getsignal({_name_of(n)})": it for n, it in handlers.items() if callable(it)}
    return Root("", "", names)


def _name_of(number: int) -> str:
    """Return how to write a signal: ``signal.SIGUSR1``, or its number if it has no name."""
    return f"signal.{number.name}" if isinstance(number, signal.Signals) else str(number)
