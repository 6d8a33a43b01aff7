"""An exception that a signal handler raises while the meter runs reaches the test."""

import functools
import gc
import signal
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters.ledger import Ledger
from pytest_cka_memory.meters.patching import hook_for
from pytest_cka_memory.meters.storage_meter import StorageMeter, StorageTracker

LONGEST_WAIT_SECONDS = 120


class StopError(Exception):
    """The exception that the signal handlers raise."""


def stop(*_: object) -> None:
    raise StopError


class Handler:
    def __call__(self, *_: object) -> None:
        raise StopError

    def method(self, *_: object) -> None:
        raise StopError


def wait() -> None:
    end = time.monotonic() + LONGEST_WAIT_SECONDS
    while time.monotonic() < end:
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Install a handler for ``SIGTERM`` that raises, and Python's own for ``SIGINT``."""
    signals = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in signals.items()}
    yield
    after = signal.getsignal(signal.SIGINT)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after is signal.default_int_handler


@pytest.fixture
def collect_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Run the garbage collector once with a callback and its unraisable hook."""

    def collect(callback: Callable[..., None]) -> None:
        monkeypatch.setattr(sys, "unraisablehook", hook_for(callback))
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)

    return collect


def at_the_start(function: Callable[[], None]) -> Callable[..., None]:
    """Return a garbage collector callback that calls `function` when a collection starts."""
    return lambda phase, info: function() if phase == "start" else None


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(stop, id="function"),
        pytest.param(Handler().method, id="method"),
        pytest.param(Handler(), id="object"),
        pytest.param(functools.partial(stop, 1), id="partial"),
    ],
)
def test_exception_of_a_handler_is_raised_after_the_callback(
    collect_with: Callable[..., None], handler: Any
) -> None:
    """Python only prints a signal's exception in a callback of the collector: it is raised after
    it.
    """
    signal.signal(signal.SIGTERM, handler)
    with pytest.raises(StopError):  # noqa: PT012
        collect_with(at_the_start(lambda: signal.raise_signal(signal.SIGTERM)))
        wait()


def test_ctrl_c_is_raised_after_the_callback(collect_with: Callable[..., None]) -> None:
    """Ctrl-C in a callback of the garbage collector is raised after it; its handler is written in
    C.
    """
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        collect_with(at_the_start(lambda: signal.raise_signal(signal.SIGINT)))
        wait()


def test_exception_in_the_next_callback_is_raised_after_it(
    collect_with: Callable[..., None],
) -> None:
    """If a collection outlasts the delay of a signal, its exception follows the next callback."""

    def callback(phase: str, info: object) -> None:
        signal.raise_signal(signal.SIGTERM) if phase == "start" else wait()

    with pytest.raises(StopError):  # noqa: PT012
        collect_with(callback)
        wait()


def test_exception_in_a_callback_of_another_library_is_raised_after_it(
    collect_with: Callable[..., None],
) -> None:
    """A signal's exception in another library's callback, such as
    Hypothesis's, is raised after it.
    """

    def other_callback(phase: str, info: object) -> None:
        if phase == "stop":
            wait()

    gc.callbacks.append(other_callback)
    try:
        with pytest.raises(StopError):  # noqa: PT012
            collect_with(at_the_start(lambda: signal.raise_signal(signal.SIGTERM)))
            wait()
    finally:
        gc.callbacks.remove(other_callback)


def test_errors_of_the_callback_go_to_the_earlier_unraisable_hook(
    collect_with: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of a callback of the collector go to the earlier unraisable hook, and fail no test."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(dropped.exc_type))
    collect_with(at_the_start(lambda: 1 // 0))
    assert seen == [ZeroDivisionError]


def test_signal_during_the_search_for_new_storages_reaches_the_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal during the search reaches the test, which would
    otherwise lose many of its alarms.
    """
    probe = MemoryProbe(meter=StorageMeter())
    with probe.measure(), monkeypatch.context() as patched:
        patched.setattr(
            StorageTracker, "record_unseen", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
        )
        with pytest.raises(StopError):  # noqa: PT012
            gc.collect(1)
            wait()


def test_freed_storage_is_recorded_without_python_code() -> None:
    """A freed storage is recorded without Python code, in which a
    signal's exception could be lost.
    """
    ledger, storage = Ledger(), torch.UntypedStorage(10)
    ledger.record(storage)
    (reference,) = weakref.getweakrefs(storage)
    assert type(reference.__callback__) is types.BuiltinMethodType
