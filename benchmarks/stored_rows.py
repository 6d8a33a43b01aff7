"""Whether the rows that were measured now are among those of a stored result.

A part of a table can be measured in a minute. If all its rows are as they were stored, no change
of the code since then has moved them. Times differ with each run: they are left out, or may differ
by a factor that is given. Machines add numbers of single precision in other orders.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

_TIMES = re.compile(
    r"(^|_)(seconds|s|ms|us|minutes|date|load|commit|processor|rss_bytes|user|wall)(_|$)"
)
_DECIMALS = re.compile(r"\d+\.\d{6,}(?:e[+-]\d+)?")
_NUMBER_OF_RUN = re.compile(
    r"0x[0-9a-f]{6,}|(?<=process )\d+|[0-9a-f]{8}(_[0-9a-f]{4}){3}_[0-9a-f]{12}"
)
"""An address, the number of a process, or what names a compiled function."""


_EXACT: Mapping[str, float] = {}


def differences(
    part: Any,
    stored: Any,
    where: str = "",
    *,
    ignored: Collection[str] = (),
    within: Mapping[str, float] = _EXACT,
) -> list[str]:
    """Return what of a part is not in the stored result, or otherwise, a line for each.

    A row of a list may stand anywhere in the stored list. Whether stored rows are missing from the
    part is not asked.

    Args:
        part: what was measured now, as JSON is read.
        stored: the stored result.
        where: what leads to them, for the lines.
        ignored: keys that are sums over all rows, which a part does not have.
        within: keys of times, of errors of rounding and of the memory of processes, and the factor
            by which each may be larger or smaller.

    Returns:
        One line for each difference; empty if everything is as it was stored.
    """
    if isinstance(part, dict) and isinstance(stored, dict):
        lines = []
        for key, value in part.items():
            place = f"{where}, {key}" if where else str(key)
            if key in within and key in stored:
                if not _is_within(value, stored[key], within[key]):
                    now = f"now {value}, more than a factor of {within[key]}"
                    lines.append(f"{place}: {stored[key]} stored, {now}")
                continue
            if key in ignored or _TIMES.search(str(key)):
                continue
            if key in stored:
                lines += differences(value, stored[key], place, ignored=ignored, within=within)
            elif value not in ({}, []):  # a key for what there may be, such as failures
                lines.append(f"{place}: not stored, now {_short(value)}")
        return lines
    if isinstance(part, list) and isinstance(stored, list):
        if part and all(isinstance(row, dict) for row in part):
            rows = (_row_differences(row, stored, where, ignored, within) for row in part)
            return [line for lines in rows for line in lines]
        if len(part) == len(stored):
            pairs = enumerate(zip(part, stored, strict=True))
            values = (
                differences(*pair, f"{where} {i}", ignored=ignored, within=within)
                for i, pair in pairs
            )
            return [line for lines in values for line in lines]
        return [f"{where}: {_short(stored)} stored, now {_short(part)}"]
    return [] if _same(part, stored) else [f"{where}: {_short(stored)} stored, now {_short(part)}"]


def _row_differences(
    row: dict[str, Any],
    stored: list[Any],
    where: str,
    ignored: Collection[str],
    within: Mapping[str, float],
) -> list[str]:
    """Return how a row differs from the stored row that is most like it."""
    words = " ".join(str(value) for value in row.values() if isinstance(value, str))[:60]
    place = f"{where}, {words}" if where else words
    rows = [other for other in stored if isinstance(other, dict)]
    each = [differences(row, other, place, ignored=ignored, within=within) for other in rows]
    return min(each, key=len) if each else [f"{place}: not stored"]


def _is_within(value: Any, stored: Any, factor: float) -> bool:
    if value is None or stored is None:
        return value is stored
    return stored / factor <= value <= stored * factor


def _same(value: Any, stored: Any) -> bool:
    if isinstance(value, float) and isinstance(stored, int | float):
        return math.isclose(value, stored, rel_tol=1e-6, abs_tol=1e-12)  # bytes are whole numbers
    if isinstance(value, str) and isinstance(stored, str):
        return _same_text(_NUMBER_OF_RUN.sub("", value), _NUMBER_OF_RUN.sub("", stored))
    return type(value) is type(stored) and value == stored


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _same_text(text: str, stored: str) -> bool:
    """Return whether two texts are equal but for the last digits of long decimal fractions."""
    if _DECIMALS.sub("", text) != _DECIMALS.sub("", stored):
        return False
    pairs = zip(_DECIMALS.findall(text), _DECIMALS.findall(stored), strict=True)
    return all(_same(float(number), float(old)) for number, old in pairs)
