"""Raise an exception of a signal handler again if Python has dropped it in a GC callback.

Ctrl-C and a timeout's alarm raise in the code that the main thread runs at that time. If that is a
callback of the garbage collector, Python passes the exception to ``sys.unraisablehook`` and
continues, so a test that hangs would never end.
"""

import functools
import signal
import sys
import threading
import time
import traceback
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

_MOMENT_SECONDS = 0.001


def hook_for(callback: object) -> "Callable[[UnraisableHookArgs], Any]":
    """Return a ``sys.unraisablehook`` that raises a signal's exception from `callback` again.

    Other exceptions go to the hook that is installed now.
    """
    before = sys.unraisablehook

    def hook(dropped: "UnraisableHookArgs") -> None:
        error = dropped.exc_value
        # Raised again, it may be dropped in another library's callback of the same collection.
        if error is not None and (
            (_came_from(callback, dropped) and _was_signalled(error)) or _ran(error, [_deliver])
        ):
            _raise_later(error)
        else:
            before(dropped)

    return hook


def _came_from(callback: object, dropped: "UnraisableHookArgs") -> bool:
    """Whether Python called `callback`; since 3.14, only the message names a collector callback."""
    if dropped.object is not None or not dropped.err_msg:
        return dropped.object == callback
    return dropped.err_msg.endswith(f"GC callback {callback!r}")


def _was_signalled(error: BaseException) -> bool:
    """Whether a signal handler raised it; handlers run in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [_deliver, *map(signal.getsignal, signal.valid_signals())]
    return isinstance(error, KeyboardInterrupt) or _ran(error, handlers)


def _ran(error: BaseException, handlers: Iterable[Any]) -> bool:
    """Whether one of `handlers` raised `error`."""
    run = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code_of(handler) in run for handler in handlers)


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def _raise_later(error: BaseException) -> None:
    """Raise `error` in the main thread by means of a SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, functools.partial(_deliver, error, before))
    start_new_thread(_interrupt, ())  # Thread.start waits, and tests patch it


def _deliver(error: BaseException, before: Any, _signal: int, _frame: object) -> None:
    signal.signal(signal.SIGINT, before)
    raise error.with_traceback(None)


def _interrupt() -> None:
    time.sleep(_MOMENT_SECONDS)  # otherwise it may be raised in the same callback
    interrupt_main()
