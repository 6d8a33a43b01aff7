"""What a signal's handler raises reaches the test, wherever the meter is just then."""

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
from pytest_cka_memory.meters.ledger.dispatch import StorageTracker
from pytest_cka_memory.meters.ledger.interrupts import hook_for
from pytest_cka_memory.meters.ledger.ledger import Ledger

LONGEST_WAIT_SECONDS = 20


class StopError(Exception):
    """What the handlers raise."""


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
    """A ``SIGTERM`` that stops, and a ``SIGINT`` as in a terminal."""
    signals = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in signals.items()}
    yield
    after = signal.getsignal(signal.SIGINT)
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after is signal.default_int_handler


@pytest.fixture
def collecting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Collect once, with a callback that the hook is for."""

    def collect(callback: Callable[..., None]) -> None:
        monkeypatch.setattr(sys, "unraisablehook", hook_for(callback))
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)

    return collect


def at_the_start(function: Callable[[], None]) -> Callable[..., None]:
    """A callback of the garbage collector's that calls `function` once."""
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
def test_what_a_handler_raises_is_raised_after_the_callback(
    collecting: Callable[..., None], handler: Any
) -> None:
    """Python alone would print it and go on."""
    signal.signal(signal.SIGTERM, handler)
    with pytest.raises(StopError):  # noqa: PT012
        collecting(at_the_start(lambda: signal.raise_signal(signal.SIGTERM)))
        wait()


def test_ctrl_c_is_raised_after_the_callback(collecting: Callable[..., None]) -> None:
    """Its handler is no Python code, and so in no traceback."""
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        collecting(at_the_start(lambda: signal.raise_signal(signal.SIGINT)))
        wait()


def test_what_comes_in_the_callback_again_is_raised_after_it(
    collecting: Callable[..., None],
) -> None:
    """As where the collection takes longer than the moment waited."""

    def callback(phase: str, info: object) -> None:
        signal.raise_signal(signal.SIGTERM) if phase == "start" else wait()

    with pytest.raises(StopError):  # noqa: PT012
        collecting(callback)
        wait()


def test_what_comes_in_the_callback_of_another_is_raised_after_it(
    collecting: Callable[..., None],
) -> None:
    """Hypothesis has one, too."""

    def anothers(phase: str, info: object) -> None:
        if phase == "stop":
            wait()

    gc.callbacks.append(anothers)
    try:
        with pytest.raises(StopError):  # noqa: PT012
            collecting(at_the_start(lambda: signal.raise_signal(signal.SIGTERM)))
            wait()
    finally:
        gc.callbacks.remove(anothers)


def test_the_callbacks_own_errors_go_where_they_went(
    collecting: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no reason to fail the test that happens to run."""
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: seen.append(dropped.exc_type))
    collecting(at_the_start(lambda: 1 // 0))
    assert seen == [ZeroDivisionError]


def test_a_region_loses_no_signal_to_its_look_at_the_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than half of all alarms were lost where a test made many small objects."""
    with MemoryProbe("cpu").measure(), monkeypatch.context() as patched:
        patched.setattr(
            StorageTracker, "find_unseen", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
        )
        with pytest.raises(StopError):  # noqa: PT012
            gc.collect(1)
            wait()


def test_a_death_is_noted_without_python_code() -> None:
    """In which a signal's handler would run, and what it raises be dropped."""
    ledger, storage = Ledger(), torch.UntypedStorage(10)
    ledger.book(storage)
    (reference,) = weakref.getweakrefs(storage)
    assert type(reference.__callback__) is types.BuiltinMethodType
