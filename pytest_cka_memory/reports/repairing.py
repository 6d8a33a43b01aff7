"""The command that tries what would lower a peak, for messages of tests that need too much."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.report import is_scope
from pytest_cka_memory.core.verdicts import Breach
from pytest_cka_memory.meters.device_names import is_emulated
from pytest_cka_memory.units import MB

_LEVELS = ("peak_increase_bytes", "peak_bytes")
_RESERVE = "reserved_increase_bytes"
_LIMITS = ("max_peak_mb", "max_level_mb", "max_reserved_mb", "fits", "--cka-memory-max-peak-mb")
_TEXT = "this tries what would lower it, on this test, and prints what to write:"


def lines(
    nodeid: str, facts: Mapping[str, Any], breach: Breach, record: RegionRecord
) -> Iterator[str]:
    """Yield two lines if a broken limit is one on a peak or a reserve."""
    if not nodeid or is_scope(nodeid) or not is_about(breach):
        return
    budget = ""
    if breach.figure in _LEVELS and breach.measured_bytes is not None:
        # The command compares the whole level.
        excess_bytes = breach.measured_bytes - breach.allowed_bytes
        allowed_bytes = record.peak_bytes - excess_bytes
        whole = f"{int(100 * allowed_bytes / MB) / 100:g}MB"  # rounded down
        budget = f" --to {whole if allowed_bytes >= MB else f'{allowed_bytes}B'}"
    yield f"  {_TEXT}"
    yield f"    {command(nodeid, facts)}{budget}"


def is_about(breach: Breach) -> bool:
    """Whether a limit is one on how high a peak or a reserve may be.

    Not one of a baseline: what has risen since is found by what the message says.
    """
    is_known = breach.figure in (*_LEVELS, _RESERVE) and breach.measured_bytes is not None
    return is_known and breach.limit.startswith(_LIMITS)


def out_of_memory(nodeid: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the lines for a test that has run out of the device's memory."""
    return [_TEXT.replace("lower it", "make it fit"), f"  {command(nodeid, facts)}"]


def command(nodeid: str, facts: Mapping[str, Any]) -> str:
    """Return the command for a test on the device of a session."""
    device = str(facts["device"]).partition(", device")[0]
    options = f" --device {device}"
    if is_emulated(device):
        options = f" --card {device.rpartition(':')[2]}"
    return f"python -m pytest_cka_memory repair {shlex.quote(nodeid)}{options}"
