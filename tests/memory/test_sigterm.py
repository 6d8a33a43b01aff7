"""SIGTERM while ranks measure is handled only if it would end the process."""

import os
import signal
from collections.abc import Iterator

import pytest

from pytest_cka_memory.integrations.sigterm import OnSigterm


@pytest.fixture(autouse=True)
def _default_action() -> Iterator[None]:
    """Start with the default action, which ends the process, and restore the handler afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_calls_the_function_until_stop() -> None:
    """Until ``stop``, SIGTERM calls the function and does not end the process."""
    calls: list[int] = []
    handler = OnSigterm(lambda: calls.append(1))
    handler.start()
    signal.raise_signal(signal.SIGTERM)
    handler.stop()
    assert calls == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_user_stays_installed() -> None:
    """A user's handler, for example one that saves a job's state, stays, also after ``stop``."""

    def save(number: int, frame: object) -> None:
        """Stand in for a user's handler."""

    signal.signal(signal.SIGTERM, save)
    handler = OnSigterm(lambda: None)
    handler.start()
    assert signal.getsignal(signal.SIGTERM) is save
    handler.stop()
    assert signal.getsignal(signal.SIGTERM) is save


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_default_action() -> None:
    """A forked child has the default action, because a DataLoader stops its workers by SIGTERM."""
    handler = OnSigterm(lambda: None)
    handler.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    _, status = os.waitpid(child, 0)
    handler.stop()
    assert os.waitstatus_to_exitcode(status) == 0
