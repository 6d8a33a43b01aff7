"""A process per command of a page, forked from a server that has imported torch once.

A command must not see what an earlier one left in memory, and to import torch for each would take
most of the time.
"""

import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "pytest"])
_TESTS = str(Path(__file__).parents[1])


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run ``pytest ...`` or ``python ...`` in this folder; returns its status and output."""
    printed = Path(os.getcwd()).with_name(".printed.txt")
    process = _CONTEXT.Process(
        target=_command, args=(words, os.getcwd(), dict(os.environ), printed)
    )
    process.start()
    process.join(120)
    assert process.exitcode is not None, f"still running after two minutes: {words}"
    text = printed.read_text("utf-8")
    printed.unlink()
    return process.exitcode, text


def _command(
    words: Sequence[str], folder: str, environment: Mapping[str, str], printed: Path
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.dont_write_bytecode = True  # a page may write a module twice within a second
    sys.path[:] = [path for path in sys.path if not path.startswith(_TESTS)]
    with printed.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    # Collections then leave out what importing torch created, which references no tensor.
    gc.freeze()
    status = _run(words)
    sys.stdout.flush()
    sys.exit(status)


def _run(words: Sequence[str]) -> int:
    program, *arguments = words
    if program == "pytest":
        return int(pytest.main(arguments))
    if arguments[:2] == ["-m", "pytest_cka_memory"]:
        from pytest_cka_memory.cli.main import main

        return main(arguments[2:])
    sys.path.insert(0, os.getcwd())
    runpy.run_path(arguments[0], run_name="__main__")
    return 0
