"""Settings of torch's allocator: as a snapshot has them, and as ``PYTORCH_ALLOC_CONF`` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pytest_cka_memory.units import MB

AS_RECORDED = ""
"""Stands for the settings that a recording was made with."""
ALTERNATIVES = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "max_split_size_mb:128,expandable_segments:True",
)
"""What is tried if nothing is named."""


def recorded(settings: Mapping[str, Any]) -> str:
    """Return the text of ``PYTORCH_ALLOC_CONF`` that has the settings of a snapshot.

    Settings of pinned memory and of the time at which locks are held change no figure here.

    Args:
        settings: ``allocator_settings`` of a snapshot.

    Example:
        >>> recorded({"expandable_segments": True, "max_split_size": -1})
        'expandable_segments:True'
    """
    parts = []
    if settings.get("expandable_segments") is True:
        parts.append("expandable_segments:True")
    split = settings.get("max_split_size", -1)
    if _is_number(split) and 0 < split < 2**40:
        parts.append(f"max_split_size_mb:{int(split) // MB}")
    rounding = settings.get("max_non_split_rounding_size", settings.get("max_round_threshold", -1))
    if _is_number(rounding) and 0 < rounding < 2**40:
        parts.append(f"max_non_split_rounding_mb:{int(rounding) // MB}")
    threshold = settings.get("garbage_collection_threshold", 0)
    if _is_number(threshold) and 0 < threshold < 1:
        parts.append(f"garbage_collection_threshold:{threshold:g}")
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(divisions.values()):
        parts.append(f"roundup_power2_divisions:{_divisions(divisions)}")
    return ",".join(parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _divisions(table: Mapping[str, Any]) -> str:
    """Return the table of roundings: one number, or a list of sizes in MB."""
    known = {int(size): int(number) for size, number in table.items() if size.isdigit()}
    values = set(known.values())
    if len(values) == 1:
        return str(values.pop())
    # 0 stands for no rounding, which is written as 1.
    pairs = [f"{size}:{max(1, known[size])}" for size in sorted(known)]
    return f"[{','.join(pairs)}]"


_LEAST_BLOCK_BYTES = 512


def rounding(settings: Mapping[str, Any]) -> Callable[[int], int]:
    """Return the function that turns a request into the bytes of its block.

    Args:
        settings: ``allocator_settings`` of a snapshot.

    Example:
        >>> rounding({})(1000)
        1024
    """
    divisions = settings.get("roundup_power2_divisions")
    table = divisions if isinstance(divisions, dict) else {}
    by_exponent: dict[int, int] = {
        int(size).bit_length() - 1: int(number)
        for size, number in table.items()
        if size.isdigit() and number > 1
    }
    if not by_exponent:
        return _rounded
    most = max(by_exponent)

    def rounded(size: int) -> int:
        exponent = max(0, (size // MB).bit_length() - 1)
        number = by_exponent.get(min(exponent, most), 0)
        if number < 2 or size <= _LEAST_BLOCK_BYTES * number:
            return _rounded(size)
        step = max(1, (1 << (size.bit_length() - 1)) // number)
        return -(-size // step) * step

    return rounded


def _rounded(size: int) -> int:
    return max(_LEAST_BLOCK_BYTES, -(-size // _LEAST_BLOCK_BYTES) * _LEAST_BLOCK_BYTES)
