"""How ``python -m pytest_cka_memory repair`` ends: by signals, or if a session takes too long."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_cka_memory import cli
from pytest_cka_memory.cli import Session
from pytest_cka_memory.plugin.repair_session import VALUES, Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
COMMAND = """
import signal
import sys
from pytest_cka_memory.cli.main import main

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.executable = {python!r}
sys.exit(main(["repair", "--device", "cpu", "train.py"]))
"""
"""Tests that run in the background ignore SIGINT, and so would what they start."""
SLEEPING = """
#!/bin/sh
trap 'touch interrupted; kill $!; exit 0' INT
sleep 300 &
echo $$ $! > pids.new && mv pids.new pids
wait
"""
"""A session that does nothing, and has started a process; Ctrl-C ends it."""
WORKING = "#!/bin/sh\nwhile :; do :; done\n"


def program(path: Path, text: str) -> str:
    """Write a program in the place of Python; return its path."""
    path.write_text(textwrap.dedent(text).lstrip(), "utf-8")
    path.chmod(0o700)
    return str(path)


def state_of(process: int) -> str:
    """Return the state of a process as Linux shows it: S if it waits, X if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    return "X"


def is_running(process: int) -> bool:
    """Whether a process has not ended."""
    return state_of(process) not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Return whether a condition holds after at most some seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def command(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Return the command while its session runs; it makes temporary files in the folder tmp."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "train.py").write_text("print()\n", "utf-8")
    python = program(tmp_path / "python", SLEEPING)
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(python=python)],
        cwd=tmp_path,
        env={
            **os.environ,
            "TMPDIR": str(tmp_path / "tmp"),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert wait_until((tmp_path / "pids").exists)
            # A command that has just started the session does not know its process yet.
            assert wait_until(lambda: state_of(process.pid) == "S")
            yield process
        finally:
            process.kill()
            for number in (tmp_path / "pids").read_text("utf-8").split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_the_session_too_and_leaves_no_files(
    command: "subprocess.Popen[str]", tmp_path: Path, number: int
) -> None:
    """A session that runs on would take processors and memory that nobody knows of."""
    session, started = map(int, (tmp_path / "pids").read_text("utf-8").split())
    command.send_signal(number)
    assert command.wait(30) == 128 + number
    assert wait_until(lambda: not is_running(session) and not is_running(started))
    assert not list((tmp_path / "tmp").iterdir())


def test_session_ends_when_the_command_is_killed(
    command: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """The system ends the session then; what it has started is its own affair."""
    session, _ = map(int, (tmp_path / "pids").read_text("utf-8").split())
    command.kill()
    assert wait_until(lambda: not is_running(session))


def test_interrupt_reaches_the_session(command: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """It writes what it has found; here it has found nothing."""
    command.send_signal(signal.SIGINT)
    assert command.stderr is not None
    assert "ran no test" in command.stderr.read()
    assert (tmp_path / "interrupted").exists()


@pytest.mark.parametrize(
    ("text", "is_late"), [(WORKING, False), (SLEEPING, True)], ids=["works", "waits"]
)
def test_session_that_waits_for_a_processor_has_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, is_late: bool
) -> None:
    """It may take longer until it has had its seconds of a processor, but not for ever."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", text))
    monkeypatch.setattr(cli, "_BETWEEN_LOOKS", 0.05)
    begun = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as error:
        Session("cpu", []).results(Task("", VALUES), timeout=0.2)
    assert error.value.timeout == 0.2
    assert (time.monotonic() - begun >= 4 * 0.2) or not is_late
    sessions = Path("pids").read_text("utf-8").split() if is_late else []
    assert wait_until(lambda: not any(is_running(int(number)) for number in sessions))


@pytest.mark.slow
def test_processor_time_is_that_of_descendants_too() -> None:
    """A script may compute in processes that it starts."""
    work = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cli._processor_seconds(process.pid, 0.0) >= 0.5
        process.communicate("\n")
