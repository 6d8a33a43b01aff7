"""A writer killed by SIGKILL leaves either the complete old file or the complete new file."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_cka_memory.stored import baselines

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")

REGIONS = 2000
WRITER = f"""
import itertools
import sys
from pathlib import Path
from pytest_cka_memory.stored import baselines
from pytest_cka_memory.stored.baselines import BaselineKey
from pytest_cka_memory.core.conditions import Fingerprint
from pytest_cka_memory.reports import files
from pytest_cka_memory.core.figures import COMPARED

def text(number):
    figures = dict.fromkeys(COMPARED, number)
    device = Fingerprint("cpu", "exact", "2.15")
    keys = [BaselineKey(f"t.py::t{{n}}", "", device) for n in range({REGIONS})]
    return baselines.render(dict.fromkeys(keys, figures))

path, texts = Path(sys.argv[1]), [text(1), text(2)]
"""
WRITE_REPEATEDLY = """
files.write_whole(path, texts[0])
print("writing", flush=True)
for number in itertools.count(1):
    files.write_whole(path, texts[number % 2])
"""
WRITE_ONCE = """
import os, signal
files.write_whole(path, texts[0])
open_path = Path.open

def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_before(owner, name):
    setattr(owner, name, lambda *args, **kwargs: kill_self())

def kill_after(owner, name):
    function = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (function(*args, **kwargs), kill_self()))

def at_the_new_file(do):
    # The old file is opened too, to see whether it can be written.
    def open_and_do(opened, mode="r", *args, **kwargs):
        return do(opened) if mode == "xb" else open_path(opened, mode, *args, **kwargs)
    Path.open = open_and_do

def kill_halfway_through_the_text(opened):
    file = open_path(opened, "xb")
    write = file.write
    file.write = lambda data: (write(data[: len(data) // 2]), file.flush(), kill_self())
    return file

{step}
files.write_whole(path, texts[1])
"""


def number_in(path: Path) -> int:
    """Check that the file is complete, and return the number that all its figures have."""
    entries = baselines.read(path)
    assert len(entries) == REGIONS
    (number,) = {figure for figures in entries.values() for figure in figures.values()}
    assert number is not None
    return number


@pytest.mark.slow
def test_writer_killed_at_a_random_moment_leaves_a_complete_file(tmp_path: Path) -> None:
    """If a writer is killed, the file is complete, and the next one ignores the temporary file."""
    path = tmp_path / "baseline.json"
    moments = random.Random(0)
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER + WRITE_REPEATEDLY, path],
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            time.sleep(moments.uniform(0, 0.05))  # any delay is valid: the test waits for no event
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert number_in(path) in (1, 2)


@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("at_the_new_file(lambda opened: kill_self())", 1),
        ("at_the_new_file(lambda opened: (open_path(opened, 'xb'), kill_self()))", 1),
        ("at_the_new_file(kill_halfway_through_the_text)", 1),
        ("kill_before(os, 'fsync')", 1),
        ("kill_after(os, 'fsync')", 1),
        ("kill_before(os, 'chown')", 1),
        ("kill_before(Path, 'chmod')", 1),
        ("kill_before(Path, 'replace')", 1),
        ("kill_after(Path, 'replace')", 2),
    ],
)
def test_writer_killed_at_a_step_leaves_a_complete_file(
    run_python: Callable[..., Any], tmp_path: Path, step: str, left: int
) -> None:
    """Until the last step of writing, a killed writer leaves the old file, and then the new one."""
    path = tmp_path / "baseline.json"
    code = WRITER + WRITE_ONCE.format(step=step)
    ended = run_python("-c", code, path)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert number_in(path) == left
