"""Inner sessions about baselines: their options, a marked test, and what the file contains."""

import json
from pathlib import Path
from typing import Any

FILE = "cka-memory-baseline.json"
UPDATE = "--cka-memory-update-baseline"
GATE = f"--cka-memory-baseline={FILE}"
OTHER_DEVICE = """
METER.device, METER.device_name, METER.name = "cuda:0", "NVIDIA H200", "another"
"""
TEST = """
import pytest

@pytest.mark.memory_baseline{arguments}
def test_it(cka_memory, meter):
    with cka_memory.measure("part") as region:
        {action}
"""


def baseline_test(
    peak: int | str = 0, arguments: str = "", action: str = "meter.free(meter.allocate({}))"
) -> str:
    """Return a marked test whose region has this peak."""
    return TEST.format(arguments=arguments, action=action.format(peak))


def regions_in(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a baseline file, without its header."""
    lines: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return lines[1:]
