"""Tables of what live tensors cost, and what explaining them does, from the committed results."""

import math

from processes import Row

_CASES = {
    "older": "older than the region, which keeps one more",
    "kept": "made in the region and kept",
    "older, freed": "older, and the region frees one of them",
    "kept, freed": "kept, and the region frees an older one",
    "older, held": "older, and a limit on retained memory is broken",
    "kept, held": "kept, and this limit is broken",
}
_TENSORS = (10_000, 100_000)


def rows(found: list[Row]) -> list[tuple[str, ...]]:
    """Return a line for each case, with the microseconds for each tensor on each device."""
    devices = list(dict.fromkeys(row["device"] for row in found if row["part"] == "region end"))
    known = {
        (row["device"], row["case"], row["tensors"]): f"{row['end_us_per_tensor']:.1f}"
        for row in found
        if row["part"] == "region end"
    }
    return [
        (text, *(known.get((device, case, n), "-") for device in devices for n in _TENSORS))
        for case, text in _CASES.items()
    ]


def head() -> tuple[str, ...]:
    """Return the head of the table."""
    return (
        "live tensors",
        *(f"{device}, {n:,}" for device in ("CPU", "emulated CUDA") for n in _TENSORS),
    )


_EXPLAINED = (1_000, 32_000, 100_000, 1_000_000)


def explanation_head() -> tuple[str, ...]:
    """Return the head of the table of explanations."""
    return ("held by", *(f"{n:,}" for n in _EXPLAINED), "exponent", "memory")


def explanation_rows(found: list[Row]) -> list[tuple[str, ...]]:
    """Return a line for each way to hold tensors: seconds, exponent, and memory at the most.

    The exponent is that of the time from 32,000 tensors on: before, most of the time is that of
    everything else that the program has.
    """
    lines = []
    for way in dict.fromkeys(row["held by"] for row in found):
        rows = {row["tensors"]: row for row in found if row["held by"] == way}
        least, most = rows[_EXPLAINED[1]], rows[max(rows)]
        factor = math.log(most["tensors"] / least["tensors"])
        exponent = math.log(most["seconds"] / least["seconds"]) / factor
        seconds = (f"{rows[n]['seconds']:.2f} s" if n in rows else "-" for n in _EXPLAINED)
        memory = most["most_mb"] / most["resident_mb"]
        lines.append((way, *seconds, f"{exponent:.2f}", f"{memory:.2f} times"))
    return lines
