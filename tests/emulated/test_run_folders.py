"""The program and the temporary folder of ``python -m emulated_cuda`` if it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from emulated_cuda.loading import records

ROOT = Path(__file__).parents[2]
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
Run = tuple[subprocess.Popen[str], int]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which this process and its children make temporary ones."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def start(emulation: None, tmp_path: Path) -> Iterator[Callable[[], Run]]:
    """Start a program that waits; return the command and the number of the program."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS, encoding="utf-8")
    started: list[Run] = []

    def run() -> Run:
        words = [sys.executable, "-m", "emulated_cuda", str(script)]
        command = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=end_by_hangup
        )
        assert command.stdout is not None
        started.append((command, int(command.stdout.readline())))
        return started[-1]

    yield run
    for command, program in started:
        for process in (command.pid, program):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        command.wait()
        if command.stdout is not None:
            command.stdout.close()


def end_by_hangup() -> None:
    """Undo what ``nohup`` sets, which children inherit."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def wait_until_ended(process: int) -> None:
    """Return when the process is gone, or a zombie whose parent never asks."""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)
    raise AssertionError(f"{process} still runs")


def test_program_ends_with_a_command_that_is_killed(start, temporary: Path) -> None:
    """SIGKILL of the command ends the program; the folder that stays is removed by the next start.

    The folder of a command that runs is not touched.
    """
    killed, program = start()
    other, _ = start()
    folders = set(temporary.iterdir())
    assert len(folders) == 2
    killed.kill()
    killed.wait()
    wait_until_ended(program)
    assert set(temporary.iterdir()) == folders
    with records.folder_of_records() as folder:
        left = set(temporary.iterdir()) - {folder}
        assert len(left) == 1
        assert left < folders
    other.terminate()
    assert other.wait() == -signal.SIGTERM
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_signal_that_ends_the_command_ends_the_program(start, temporary: Path, sent: int) -> None:
    """The program gets the signal, the command ends by it, and no folder stays."""
    command, program = start()
    command.send_signal(sent)
    assert command.wait() == -sent
    wait_until_ended(program)
    assert list(temporary.iterdir()) == []


def test_folders_of_others_and_links_are_left_alone(temporary: Path, tmp_path: Path) -> None:
    """Only folders of this name, of this user, that no process has locked are removed."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (temporary / "emulated-cuda-records-link").symlink_to(elsewhere)
    (temporary / "emulated-cuda-0-driver").mkdir()
    (temporary / "emulated-cuda-records-stale").mkdir()
    records.remove_stale_folders()
    assert elsewhere.is_dir()
    names = {path.name for path in temporary.iterdir()}
    assert names == {"emulated-cuda-records-link", "emulated-cuda-0-driver"}
