"""A program that runs Python in a fork of a process that has imported torch already."""

import sys
from pathlib import Path

import forked_processes
import forked_workers


def forked_python(folder: Path) -> Path:
    """Write the program into a folder and return its path; others can start it as an interpreter.

    It takes the options ``-c`` and ``-m`` only. Like every process of `forked_processes`, it is as
    fresh as a new interpreter but has no time to wait until torch is imported.
    """
    address = forked_processes.forked_workers()._address
    program = folder / "python"
    program.write_text(
        f"#!/bin/sh\n"
        f"export {forked_workers._SOCKET}='{address}'\n"
        f"exec '{sys.executable}' -S -E '{forked_workers.__file__}' \"$@\"\n",
        "utf-8",
    )
    program.chmod(0o755)
    return program
