"""The table of all hints: a program that each appears in, and the program edited as it says.

A program is a function of the fixture ``cka_memory``, as the body of a test is. The edited programs
of a row must keep the limit that its first program breaks.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

Program = Callable[[Any], None]
KEEP: list[Any] = []
"""Where most programs store what they leak; emptied after each of them."""
CLEANUP = ExitStack()
"""Callbacks that undo what else a program changed."""
CPU, CARD = "cpu", "emulate:cuda"
TENSORS = "cpu-tensors"
"""The CPU without the native counter, so that tensors are counted."""
DEVICES = (CPU, CARD)


@dataclass(eq=False)
class Row:
    """A hint, a program in which it appears, and the programs that follow it."""

    hint: str
    """All that is printed, as one line."""
    program: Program
    limit: pytest.MarkDecorator
    devices: tuple[str, ...]
    skip: str
    """Why it cannot run here; empty if it can."""
    is_command: bool
    """Whether the hint is what is known and a command that finds out more: nothing to follow."""
    in_message: bool = False
    """Whether the hint is a part of the sentence about the limit, and not a line of its own."""
    followed: list[Program] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.program.__name__


ROWS: list[Row] = []
ELSEWHERE = {
    "test_plugin_that_keeps_an_exception_is_left_out_as_advised": (
        "a plugin that sets the attribute `kept` on the test item stores an exception, "
        "which keeps its frames and their variables alive; run without it (-p no:NAME for "
        "a plugin of pytest), and report this to its authors"
    ),
}
"""Tests of hints that no program of this table can follow -> the hint."""
COMMANDS = {
    "if the memory is a workspace of cuBLAS, which is kept for the next matrix product, call "
    "torch._C._cuda_clearCublasWorkspaces()": "torch 2.15 keeps none",
    "run nvidia-smi to see the processes that use the card; this is memory of the CUDA "
    "context, NCCL, other libraries or other processes": "the emulated device has no other "
    "processes",
    "to find the reason, call region.batch_done() while the reserved memory is high, on a device "
    "that supports memory snapshots; the allocator reserved more than was in use at once, perhaps "
    "because free blocks were too small for the requests": "each device here has one",
    "synchronize before these blocks are needed again, or allocate them on the stream that "
    "uses them; blocks that were used on another stream (record_stream) wait for that "
    "stream": ("the emulated device finishes all work at once"),
    "set num_workers=0, so that the test measures the same code in this process, which grows only "
    "if the data set keeps something; the workers grow, but this operating system does not report "
    "how much of that is copies of memory shared with this process": ("Linux counts it"),
}
"""Hints that are a command, which no program of this table prints -> why."""
RETAINED = pytest.mark.zero_retention
FLAT = pytest.mark.flat_per_batch


def advice(
    hint: str,
    *,
    limit: pytest.MarkDecorator = RETAINED,
    devices: tuple[str, ...] = DEVICES,
    skip: str = "",
    is_command: bool = False,
    in_message: bool = False,
) -> Callable[[Program], Row]:
    """Add a hint, and the decorated program in which it appears, to the table."""

    def add(program: Program) -> Row:
        ROWS.append(Row(hint, program, limit, devices, skip, is_command, in_message))
        return ROWS[-1]

    return add


def follows(row: Row) -> Callable[[Program], Program]:
    """Add the decorated program to a row: it is edited as the row's hint says."""

    def add(program: Program) -> Program:
        row.followed.append(program)
        return program

    return add


def needs_torch(major: int, minor: int) -> str:
    """Return why a row is skipped in older versions of torch; empty in others."""
    import torch

    found = tuple(map(int, torch.__version__.split(".")[:2]))
    return "" if found >= (major, minor) else f"requires torch {major}.{minor}"


def has_native_counter() -> bool:
    from pytest_cka_memory.meters import blocks

    return blocks.functions() is not None


NATIVE = "" if has_native_counter() else "requires the native counter; it was not compiled here"
LINUX = "" if sys.platform == "linux" else "requires Linux"
