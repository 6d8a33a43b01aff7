"""SIGTERM while ranks measure is handled only if it would end the process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from pytest_cka_memory.integrations.torchrun import OnSigterm


@pytest.fixture(autouse=True)
def _default_action() -> Iterator[None]:
    """Start with the default action, which ends the process, and restore the handler afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def _never() -> None:
    raise AssertionError("the main thread was not blocked")


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "cka-memory" in thread.name]


def test_sigterm_calls_the_function_until_stop() -> None:
    """The process is not ended. After ``stop`` the signal has its default action again."""
    calls: list[int] = []
    handler = OnSigterm(lambda: calls.append(1), _never)
    handler.start()
    signal.raise_signal(signal.SIGTERM)
    handler.stop()
    assert calls == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_user_stays_installed() -> None:
    """For example one that saves a job's state; ``stop`` does not remove it either."""

    def save(number: int, frame: object) -> None:
        """Stand in for a user's handler."""

    signal.signal(signal.SIGTERM, save)
    handler = OnSigterm(lambda: None, _never)
    handler.start()
    assert signal.getsignal(signal.SIGTERM) is save
    handler.stop()
    assert signal.getsignal(signal.SIGTERM) is save


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_the_default_action() -> None:
    """A DataLoader stops its workers with SIGTERM."""
    handler = OnSigterm(lambda: None, _never)
    handler.start()
    child = os.fork()
    if child == 0:
        restored = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        os._exit(0 if restored and signal.set_wakeup_fd(-1) == -1 else 1)
    _, status = os.waitpid(child, 0)
    handler.stop()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_thread_acts_if_the_main_thread_is_blocked() -> None:
    """The main thread waits in C++ until the thread has acted, and calls its function then."""
    store, calls = HashStore(), []

    def unblock() -> None:
        calls.append(threading.current_thread().name)
        store.set("key", "value")

    handler = OnSigterm(lambda: calls.append("function"), unblock, grace_s=0.01)
    handler.start()
    sender = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM))
    sender.start()
    store.wait(["key"], timedelta(seconds=60))
    sender.join()
    handler.stop()
    assert calls == ["cka-memory-signals", "function"]


def test_stop_ends_the_thread_and_its_use_of_the_descriptor() -> None:
    """The thread is there only between ``start`` and ``stop``, each of which may be repeated."""
    handler = OnSigterm(lambda: None, _never)
    for _ in range(2):
        handler.start()
    assert _threads() == ["cka-memory-signals"]
    for _ in range(2):
        handler.stop()
    assert _threads() == []
    assert signal.set_wakeup_fd(-1) == -1


def test_a_descriptor_of_the_user_stays_set() -> None:
    """An event loop of asyncio sets one; the function is still called."""
    calls: list[int] = []
    handler = OnSigterm(lambda: calls.append(1), _never)
    mine, other = socket.socketpair()
    with mine, other:
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        handler.start()
        signal.raise_signal(signal.SIGTERM)
        assert (_threads(), calls) == ([], [1])
        handler.stop()
        assert signal.set_wakeup_fd(-1) == other.fileno()


FORK = """
import os, threading
from pytest_cka_memory.integrations.torchrun import OnSigterm

handler = OnSigterm(print, print)
handler.start()
before = threading.active_count()
child = os.fork()
if child == 0:
    os._exit(0)
print(before, threading.active_count(), os.waitpid(child, 0)[1])
handler.resume()
print(threading.active_count())
handler.stop()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_a_process_without_other_threads_forks_without_a_warning() -> None:
    """Python 3.12 and later warn about a fork with threads; the thread is started again later."""
    command = [sys.executable, "-W", "error", "-c", FORK]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("2 1 0\n2\n", "")
