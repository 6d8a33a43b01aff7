"""SIGKILL while a file is written: the old file or the new one is there, never a torn one."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_cka_memory.baseline import file as baseline_file

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no SIGKILL")

REGIONS = 2000
WRITER = f"""
import itertools
import sys
from pathlib import Path
from pytest_cka_memory.baseline import file as baseline_file
from pytest_cka_memory.baseline.file import Fingerprint, Key
from pytest_cka_memory.reports import files
from pytest_cka_memory.core.tolerance import COMPARED

def text(number):
    figures = dict.fromkeys(COMPARED, number)
    device = Fingerprint("cpu", "exact", "2.15")
    keys = [Key(f"t.py::t{{n}}", "", device) for n in range({REGIONS})]
    return baseline_file.text(dict.fromkeys(keys, figures))

path, texts = Path(sys.argv[1]), [text(1), text(2)]
"""
FOR_EVER = """
files.write_whole(path, texts[0])
print("writing", flush=True)
for number in itertools.count(1):
    files.write_whole(path, texts[number % 2])
"""
AT_ONE_STEP = """
import os, signal, tempfile
files.write_whole(path, texts[0])

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def dies_before(owner, name):
    setattr(owner, name, lambda *args, **kwargs: dies())

def dies_after(owner, name):
    ran = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: (ran(*args, **kwargs), dies()))

def dies_half_way_through_the_text():
    opened = tempfile.NamedTemporaryFile
    def open_to_die(*args, **kwargs):
        file = opened(*args, **kwargs)
        write = file.file.write
        file.write = lambda text: (write(text[: len(text) // 2]), file.file.flush(), dies())
        return file
    tempfile.NamedTemporaryFile = open_to_die

{step}
files.write_whole(path, texts[1])
"""


def whole(path: Path) -> int:
    """The number that all figures of the file are; fails for a part of a file, or of two."""
    entries = baseline_file.read(path)
    assert len(entries) == REGIONS
    (number,) = {figure for figures in entries.values() for figure in figures.values()}
    assert number is not None
    return number


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    """Over and over; and what one leaves behind does not disturb the next."""
    path = tmp_path / "baseline.json"
    moments = random.Random(0)
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER + FOR_EVER, path], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "writing\n"
            time.sleep(moments.uniform(0, 0.05))  # any moment will do: nothing waits for this
            writer.kill()
        assert writer.returncode == -signal.SIGKILL
        assert whole(path) in (1, 2)


@pytest.mark.parametrize(
    ("step", "left"),
    [
        ("dies_before(tempfile, 'NamedTemporaryFile')", 1),
        ("dies_after(tempfile, 'NamedTemporaryFile')", 1),
        ("dies_half_way_through_the_text()", 1),
        ("dies_before(os, 'fsync')", 1),
        ("dies_after(os, 'fsync')", 1),
        ("dies_before(Path, 'chmod')", 1),
        ("dies_before(Path, 'replace')", 1),
        ("dies_after(Path, 'replace')", 2),
    ],
)
def test_a_writer_killed_at_a_step_leaves_a_whole_file(
    tmp_path: Path, step: str, left: int
) -> None:
    """The old one up to the last step, the new one from there on."""
    path = tmp_path / "baseline.json"
    code = WRITER + AT_ONE_STEP.format(step=step)
    ended = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert whole(path) == left
