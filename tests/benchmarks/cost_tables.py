"""The table of what one more live tensor costs the end of a region, from the committed results."""

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
