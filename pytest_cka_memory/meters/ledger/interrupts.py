"""Raises anew, a moment later, what a signal's handler has raised where Python drops it.

Ctrl-C and the alarm of a timeout are raised in whatever the main thread runs just then. Where that
is a callback of the garbage collector, Python passes them to ``sys.unraisablehook`` and goes on: a
test that hangs would hang for ever.
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
    """A ``sys.unraisablehook`` that drops no signal for `callback`; the rest is for that of now."""
    before = sys.unraisablehook

    def hook(dropped: "UnraisableHookArgs") -> None:
        error = dropped.exc_value
        # Raised anew, it may come in somebody else's callback of the same collection.
        if error is not None and (
            (dropped.object == callback and _was_signalled(error)) or _ran(error, [_deliver])
        ):
            _raise_later(error)
        else:
            before(dropped)

    return hook


def _was_signalled(error: BaseException) -> bool:
    """Whether it was raised in the handler of a signal; those run in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = [_deliver, *map(signal.getsignal, signal.valid_signals())]
    return isinstance(error, KeyboardInterrupt) or _ran(error, handlers)


def _ran(error: BaseException, handlers: Iterable[Any]) -> bool:
    """Whether `error` was raised in one of them."""
    run = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    return any(_code_of(handler) in run for handler in handlers)


def _code_of(handler: Any) -> object:
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def _raise_later(error: BaseException) -> None:
    """Raise `error` in the main thread, by a SIGINT that stands for it."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, functools.partial(_deliver, error, before))
    start_new_thread(_interrupt, ())  # to start a Thread waits, and is what tests patch


def _deliver(error: BaseException, before: Any, _signal: int, _frame: object) -> None:
    signal.signal(signal.SIGINT, before)
    raise error.with_traceback(None)


def _interrupt() -> None:
    time.sleep(_MOMENT_SECONDS)  # or it would come where the first has come
    interrupt_main()
