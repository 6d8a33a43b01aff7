"""Processes forked from a server that has imported torch, pytest and the plugin's modules once.

Each is as fresh as a new interpreter in every other respect. To import them again for each would
take most of their time.
"""

import atexit
import compileall
import functools
import importlib.util
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

import pytest
from forked_workers import PYTHON, SOCKET, ForkedWorkers, serve

_TESTS = str(Path(__file__).parent)
_OWN_PACKAGES = "cka", "emulated_cuda", "pytest_cka_memory"
_IMPORTED = "torch._dynamo", "pytest", "kept_metadata", "imported_plugin", "frozen_imports"
EXECUTABLE = "PYTHON_EXEC"  # that of the ranks, to torchrun
_LONGEST_SECONDS = 600  # of a process that hangs; others end sooner, also beside other work


def run(
    words: Sequence[str],
    *,
    folder: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
    merged: bool = False,
    with_children: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run ``pytest ...`` or ``python ...``; returns its status and outputs.

    In this folder and with this environment, if none are given. With `merged`, what it writes to
    stderr is part of stdout. With `with_children`, processes that it starts with `sys.executable`
    are forked, too, such as the ranks of torchrun.
    """
    with tempfile.TemporaryDirectory() as written:
        outputs = [Path(written) / name for name in ("out", "out" if merged else "err")]
        given = dict(os.environ if environment is None else environment)
        if with_children:
            given[EXECUTABLE] = interpreter()
        has_workers = words[0] == "pytest" and any(word.startswith("-n") for word in words)
        workers = _address_of_server() if has_workers else None
        arguments = (words, str(folder or os.getcwd()), given, outputs, workers)
        process = _context().Process(target=_command, args=arguments)
        process.start()
        process.join(_LONGEST_SECONDS)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"still running after {_LONGEST_SECONDS} s: {words}")
        texts = [path.read_text("utf-8") if path.exists() else "" for path in outputs]
        return subprocess.CompletedProcess(
            list(words), process.exitcode, texts[0], "" if merged else texts[1]
        )


def run_pytest(*options: str) -> pytest.RunResult:
    """Run pytest in this folder, that of a `pytester`; returns what its methods return.

    What the session starts with `sys.executable` is forked, too, such as the process in which the
    controller of xdist's workers looks for a device.
    """
    start_s = time.perf_counter()
    words = ["pytest", f"--basetemp={Path.cwd().with_name('of-forked')}", *options]
    done = run(words, with_children=True)
    for text, stream in ((done.stdout, sys.stdout), (done.stderr, sys.stderr)):
        print(text, file=stream)  # shown if the test fails
    outputs = done.stdout.splitlines(), done.stderr.splitlines()
    return pytest.RunResult(done.returncode, *outputs, time.perf_counter() - start_s)


def forked_workers() -> ForkedWorkers:
    """Return a plugin by which the workers of a session have imported torch already."""
    return ForkedWorkers(_address_of_server())


@functools.cache
def interpreter() -> str:
    """Return the path of a program that takes the options ``-c`` and ``-m`` of Python, forked."""
    address = _address_of_server()
    path = Path(address).with_name("python")
    path.write_text(f"#!/bin/sh\nexport {SOCKET}='{address}'\nexec {PYTHON} \"$@\"\n", "utf-8")
    path.chmod(0o755)
    return str(path)


@functools.cache
def _context() -> ForkServerContext:
    """Return the means to fork from a server, which has imported then what most need."""
    # A process that is forked writes no bytecode, so what only such processes import would be
    # compiled by each of them.
    for package in _OWN_PACKAGES:
        for path in importlib.util.find_spec(package).submodule_search_locations:
            compileall.compile_dir(path, quiet=2)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _TESTS, prepend=os.pathsep)
        forkserver.ensure_running()
    return context


@functools.cache
def _address_of_server() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    address = str(Path(folder) / "workers")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = _context().Process(target=serve, args=(listener,))
        server.start()
    # Not a daemon: what it forks may start processes of its own.
    atexit.register(server.kill)
    return address


def _command(
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    outputs: Sequence[Path],
    workers: str | None,
) -> None:
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        with path.open("a") as file:
            os.dup2(file.fileno(), stream.fileno())
    status = command(words, folder, environment, workers)
    sys.stdout.flush()
    sys.exit(status)


def command(
    words: Sequence[str], folder: str, environment: Mapping[str, str], workers: str | None = None
) -> int:
    """Run ``pytest ...`` or ``python ...`` in this process, which ends then; returns its status.

    The workers of pytest-xdist are forked by the server at the address `workers`.
    """
    # A new interpreter has the usual start method; this process has that of its server.
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.dont_write_bytecode = True  # a test may write a module twice within a second
    given = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*given, *(path for path in sys.path if not path.startswith(_TESTS))]
    sys.executable = environment.get(EXECUTABLE, sys.executable)
    multiprocessing.set_executable(sys.executable)  # known before, from the server's
    import imported_plugin  # by the server of this process

    program, *arguments = words
    if arguments[:2] == ["-m", "pytest"]:
        program, *arguments = arguments[1:]
    if program != "pytest":
        imported_plugin.forget("pytest_cka_memory")
    _load_device_of_parent(environment)
    if program == "pytest":
        return int(pytest.main(arguments, plugins=[ForkedWorkers(workers)] if workers else []))
    sys.path.insert(0, os.getcwd())
    if arguments[0] == "-m":
        sys.argv[:] = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        sys.modules["__main__"] = main_module = ModuleType("__main__")
        exec(arguments[1], vars(main_module))
    else:
        sys.argv[:] = arguments
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _load_device_of_parent(environment: Mapping[str, str]) -> None:
    """Load the emulated device of the process that started this one, as its ``sitecustomize``."""
    if "EMULATED_CUDA" in environment:
        from emulated_cuda import loading
        from emulated_cuda.loading.loaded import load

        setting = loading.arguments_of(environment)
        load(**setting)
