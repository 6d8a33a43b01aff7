"""``emulated_cuda.estimate``: what a function takes on a card, run in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import emulated_cuda
from emulated_cuda import DeviceError, Estimate, estimating

TRAIN = """
import torch

model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.AdamW(model.parameters())

def step(batch, seq=1024):
    model(torch.zeros(batch, seq, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def train(tmp_path: Path, forked_children: None) -> str:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return f"{path}:step"


@pytest.mark.emulates
def test_function_that_fits_has_head_room(train: str) -> None:
    """The peak includes the model of the file, and the state of the optimizer."""
    found = emulated_cuda.estimate(train, card="t4", batch=8)
    parameters = 4 * (1024 * 1024 + 1024)
    assert found.fits
    assert found.by_kind["parameters"] == parameters
    assert found.by_kind["optimiser"] >= 2 * parameters
    assert sum(found.by_kind.values()) == found.peak_bytes <= found.reserved_bytes
    assert found.head_room_bytes == found.usable_bytes - found.reserved_bytes > 0


@pytest.mark.emulates
def test_function_that_does_not_fit_says_how_much_is_missing(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is run again with more memory; the status of the command is 1."""
    assert estimating.main([train, "batch=4096", "--card", "t4", "--calls", "1"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"{train}(batch=4096) on an emulated NVIDIA T4: does not fit, ")
    assert printed[0].endswith(" MB missing")
    peak_mb = float(printed[1].split()[1].replace(",", ""))
    assert peak_mb > 2 * 4096 * 4  # inputs and results of 4 MB for each item


@pytest.mark.emulates
def test_exception_of_the_function_is_named(train: str) -> None:
    """With its line, and without the output of the process."""
    with pytest.raises(DeviceError, match=r"TypeError: step\(\) got an unexpected keyword"):
        emulated_cuda.estimate(train, heads=8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: emulated_cuda.estimate("t.py:f", card="h900"), "unknown card 'h900'"),
        (lambda: emulated_cuda.estimate("t.py:f", calls=0), "write a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(call, message: str) -> None:
    """Before a process is started."""
    with pytest.raises(DeviceError, match=message):
        call()


def test_argument_that_cannot_be_passed_is_refused() -> None:
    """An object of this process is none of the other's."""
    with pytest.raises(TypeError, match="pass only numbers, strings, lists and dicts"):
        emulated_cuda.estimate("train.py:step", model=object())


@pytest.mark.parametrize(
    ("text", "expected"),
    [("batch=8", 8), ("name=gpt2", "gpt2"), ("shape=[1, 2]", [1, 2]), ("last=None", None)],
)
def test_arguments_of_the_command_are_literals_or_texts(text: str, expected: object) -> None:
    """A value that is no literal of Python is a text."""
    assert estimating._argument(text) == (text.partition("=")[0], expected)


def test_wrong_argument_of_the_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """It says how to write one."""
    with pytest.raises(SystemExit) as ended:
        estimating.main(["train.py:step", "8"])
    assert ended.value.code == 2
    assert "'8' is not an argument; write NAME=VALUE" in capsys.readouterr().err


def test_estimate_reads_as_a_screenful() -> None:
    """Peak, reserve, kinds, and what is missing."""
    found = Estimate("train.py:step", {"batch": 8}, "a10", 23 * 2**30, 2**30, 2**31, True,
                     {"activations": 2**30})  # fmt: skip
    assert str(found).splitlines() == [
        "train.py:step(batch=8) on an emulated NVIDIA A10: fits, 21,504.0 MB headroom",
        "  peak      1,024.0 MB",
        "  reserved  2,048.0 MB of 23,552.0 MB",
        "    activations     1,024.0 MB",
    ]


@pytest.mark.emulates
def test_signal_ends_the_process_of_the_function_too(tmp_path: Path) -> None:
    """No process runs on that nobody knows of, and no temporary files are left."""
    (tmp_path / "tmp").mkdir()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho $$ > pid.new && mv pid.new pid\nexec sleep 60\n", "utf-8")
    python.chmod(0o700)
    code = (
        "import sys; from emulated_cuda import estimating; "
        f"sys.executable = {str(python)!r}; estimating.main(['train.py:step'])"
    )
    paths = {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **paths}) as process:
        end = time.monotonic() + 20
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text("utf-8")), signal.SIGKILL)
    assert not list((tmp_path / "tmp").iterdir())
