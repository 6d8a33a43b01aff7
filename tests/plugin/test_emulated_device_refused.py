"""``--cka-memory-device=emulate:cuda`` where no device can be emulated, or none is needed."""

import os
import sys
from types import ModuleType

import pytest
import torch

import emulated_cuda
from emulated_cuda.errors import TooLateError
from pytest_cka_memory.errors import DeviceError

# Sessions in this process must not import it again: tests replace its functions.
from pytest_cka_memory.plugin import device as session_device  # noqa: F401

UNMARKED = "def test_it(): pass\n"


@pytest.mark.emulates
def test_plugin_that_asked_torch_for_devices_is_named(session, pytester, monkeypatch):
    """A plugin that asked torch for devices too early is named, as torch keeps the answer."""
    pytester.makepyfile(asks="import torch\nFOUND = torch.cuda.is_available()\n")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    run = session(UNMARKED, "-pasks", "--cka-memory-device=emulate:cuda", forked=True)
    run.assert_refused(
        "--cka-memory-device: it is too late to load the emulated CUDA device: this process has "
        "already asked torch for CUDA devices",
        "; load the emulated device before any code asks torch for devices, and move calls to "
        "torch.cuda.is_available()",
        "into functions (torch was imported by plugin asks)",
    )


@pytest.fixture
def refuse(monkeypatch):
    """Return a function that makes loading fail with an error."""

    def install(error):
        def load(*_, **__):
            raise error

        monkeypatch.setattr(emulated_cuda, "load", load)

    return install


@pytest.fixture
def main_module(monkeypatch):
    """Replace the script that was started by one that does not use torch; return it."""
    module = ModuleType("__main__")
    module.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_script_that_imported_torch_is_named(session, refuse, main_module):
    """A script that called pytest.main() after asking torch for devices is named."""
    main_module.no_grad = torch.no_grad
    refuse(TooLateError("it is too late to load the emulated CUDA device"))
    run = session(UNMARKED, "--cka-memory-device=emulate:cuda")
    run.assert_refused(
        "it is too late to load the emulated CUDA device (torch was imported by ", "train.py"
    )


def test_module_that_imported_torch_is_named_if_no_plugin_did(
    session, pytester, refuse, main_module
):
    """If no plugin imported torch by itself, the module that did it is named."""
    pytester.makepyfile(helper="import torch as t\nFOUND = t.ones(1)\n", asks="import helper\n")
    pytester.syspathinsert()
    refuse(TooLateError("it is too late to load the emulated CUDA device"))
    run = session(UNMARKED, "-pasks", "--cka-memory-device=emulate:cuda")
    run.assert_refused(
        "it is too late to load the emulated CUDA device (torch was imported by ", "module helper"
    )


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["serial", "parallel"])
def test_device_that_cannot_be_emulated_here_ends_the_session(session, refuse, workers):
    """If a device cannot be emulated here, the error is that of loading, without a traceback."""
    refuse(DeviceError("emulate:cuda requires Linux on x86-64; use cpu"))
    run = session(UNMARKED, "--cka-memory-device=emulate:cuda", *workers)
    run.assert_refused("--cka-memory-device: emulate:cuda requires Linux on x86-64; use cpu")
    assert "torch was imported" not in run.errors


@pytest.mark.parametrize("option", ["--collect-only", "--help", "--version"])
def test_session_that_runs_no_test_does_not_require_the_device(session, pytester, refuse, option):
    """A session that runs no test does not need the ini file's device, so it can list tests."""
    pytester.makeini("[pytest]\ncka_memory_device = emulate:cuda\n")
    refuse(DeviceError("emulate:cuda requires Linux"))
    run = session(UNMARKED, option)
    assert run.result.ret == pytest.ExitCode.OK
    assert "requires Linux" not in run.text + run.errors


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (
            "emulate:cuda:a1000",
            "unknown card 'a1000'; write emulate:cuda, or emulate:cuda: and one",
        ),
        (
            "emulate:cuda,speed=2",
            "unknown setting 'speed=2' of the device 'emulate:cuda,speed=2'; ",
        ),
        (
            "emulate:cuda,devices=0",
            "; write values=off, events=late, devices=auto or devices=N, with N from 1 to 16",
        ),
        ("emulate:cuda,values=maybe", "unknown setting 'values=maybe' of the device"),
        ("emulate:xpu", "'emulate:xpu' is not an emulated device; write emulate:cuda"),
        ("emulate", "unknown device 'emulate'; write one of auto, cpu, cuda"),
    ],
)
def test_wrong_name_ends_the_session(session, device, message):
    """The error for a wrong device name quotes what is wrong and says what to write."""
    run = session(UNMARKED, f"--cka-memory-device={device}")
    run.assert_refused("--cka-memory-device: ", message)


@pytest.mark.parametrize("device", [None, "auto", "cpu"])
def test_other_devices_are_not_emulated(session, refuse, pytester, device):
    """If the command line names another device, nothing is emulated, whatever the ini file says."""
    pytester.makeini(f"[pytest]\ncka_memory_device = {'emulate:cuda' if device else ''}\n")
    refuse(AssertionError("it was loaded"))
    options = [f"--cka-memory-device={device}"] if device else []
    run = session("def test_it(cka_memory): pass\n", *options)
    run.assert_outcomes(passed=1)
    this_session_emulates = device != "cpu" and emulated_cuda.loaded() is not None
    assert ("emulate" in run.report["session"]["device"]) == this_session_emulates
