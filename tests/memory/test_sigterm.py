"""SIGTERM while ranks measure: heard where it would end the process, and only there."""

import os
import signal
from collections.abc import Iterator

import pytest

from pytest_cka_memory.integrations.sigterm import OnSigterm


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Begin with what a process does by default: it ends."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_it_is_heard_until_it_is_given_back() -> None:
    """Instead of the end of the process, which is its own again afterwards."""
    heard: list[int] = []
    listening = OnSigterm(lambda: heard.append(1))
    listening.start()
    signal.raise_signal(signal.SIGTERM)
    listening.stop()
    assert heard == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_whoever_listens_already_goes_on() -> None:
    """A job that saves its state on SIGTERM, for one; it is not ours to give back either."""

    def save(number: int, frame: object) -> None:
        """Of the user's."""

    signal.signal(signal.SIGTERM, save)
    listening = OnSigterm(lambda: None)
    listening.start()
    assert signal.getsignal(signal.SIGTERM) is save
    listening.stop()
    assert signal.getsignal(signal.SIGTERM) is save


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_ends_on_it_as_ever() -> None:
    """A DataLoader's worker is told so to stop."""
    listening = OnSigterm(lambda: None)
    listening.start()
    child = os.fork()
    if child == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    _, status = os.waitpid(child, 0)
    listening.stop()
    assert os.waitstatus_to_exitcode(status) == 0
