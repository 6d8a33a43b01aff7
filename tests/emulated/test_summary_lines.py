"""What ``python -m emulated_cuda`` says of a reserve that is much larger than what is in use."""

import json
import struct
from pathlib import Path

import pytest

from emulated_cuda import running
from emulated_cuda.cards import CARDS
from emulated_cuda.loading import records
from emulated_cuda.loading.records import DeviceUse, ProcessUse, Refusal

MB = 2**20


@pytest.mark.parametrize(
    ("allocated_mb", "reserved_mb", "is_warned"),
    [
        (336, 13_800, True),
        (6_000, 12_000, False),  # twice as much
        (100, 7_000, False),  # less than a tenth of the card
        (None, 13_800, False),
    ],
)
def test_reserve_that_nobody_uses_is_warned_of(
    allocated_mb: int | None, reserved_mb: int, is_warned: bool
) -> None:
    """Only a reserve of more than twice what is in use, and more than a tenth of the card."""
    allocated_bytes = None if allocated_mb is None else allocated_mb * MB
    device = DeviceUse(1, reserved_mb * MB, 0, allocated_bytes, ran_out=False)
    card = CARDS["h100"]
    process = ProcessUse(1, "train.py", None, card, card.total_bytes, True, (device,))
    line, *warnings = running.lines([process])
    assert line.endswith(": fits")
    assert [warning.startswith("warning: on cuda:1 more than twice") for warning in warnings] == (
        [True] * is_warned
    )


@pytest.mark.parametrize(
    ("free_mb", "largest_mb", "in_pools_mb", "cause"),
    [
        (900, 16, 0, "900.0 MB were free in blocks of at most 16.0 MB (fragmentation). To try "),
        (100, 16, 800, "800.0 MB were free, but only in private pools of CUDA graphs and MemPool"),
        (100, 16, 50, "only 150.0 MB were free"),
    ],
)
def test_refused_allocation_is_explained(
    free_mb: int, largest_mb: int, in_pools_mb: int, cause: str
) -> None:
    """Of 1,000 MB that were requested, the card had 200 left."""
    sizes = (1000, 200, 5000, free_mb, largest_mb, in_pools_mb)
    refusal = Refusal(*(size * MB for size in sizes))
    device = DeviceUse(0, 6000 * MB, 800 * MB, 5000 * MB, ran_out=True, refusal=refusal)
    card = CARDS["t4"]
    process = ProcessUse(1, "train.py", None, card, card.total_bytes, True, (device,))
    _, why = running.lines([process])
    assert why.startswith(
        "on cuda:0, an allocation of 1,000.0 MB was refused when 200.0 MB of the card were left. "
        f"Of the reserved memory, 5,000.0 MB were in use and {cause}"
    )


def test_processes_are_in_order_of_start_also_when_numbers_begin_again(tmp_path: Path) -> None:
    """After the highest number of a process, a system gives the low ones again."""
    for process, rank, began_ns in ((32_700, None, 1), (40, None, 2), (41, "0", 3)):
        record = {
            "program": "train.py",
            "rank": rank,
            "card": "t4",
            "total_bytes": 2**34,
            "began_ns": began_ns,
            "of_torch": None,
            "exception": None,
        }
        (tmp_path / f"{process}.json").write_text(json.dumps(record), "utf-8")
        figures = struct.pack("32Q2q", MB, *[0] * 31, 1, 0)
        (tmp_path / f"{process}.figures").write_bytes(figures)
    assert [process.process for process in records.read(tmp_path)] == [41, 32_700, 40]


FRAGMENTED = """
import torch

def empty(mb):
    return torch.empty(mb * 2**20, dtype=torch.uint8, device="cuda")

kept, others = [], []
for number in range(500):
    (others if number % 5 else kept).append(empty(4))
del others
empty(1000)
"""


@pytest.mark.emulates
def test_program_that_runs_out_of_memory_is_told_why(python, tmp_path) -> None:
    """The figures are those of torch's own allocator when it raised the error."""
    program = tmp_path / "train.py"
    program.write_text(FRAGMENTED)
    card = ("--card", "t4", "--memory", "2560MB", "--no-values")
    run = python("-m", "emulated_cuda", *card, str(program), forked_children=True)
    assert run.returncode == 1
    assert "400.0 MB were in use and 1,600.0 MB were free in blocks of at most" in run.stderr
    assert "what to do" not in run.stderr  # the line above has said it
