"""Why tests of other projects fail on the emulated device: one row for each cause."""

from __future__ import annotations

import re

KINDS = {
    "card": "fails on a card as well",
    "machine": "more than this machine's time, memory, compilers or network",
    "refused": "refused by name",
    "device": "the device differs from a card",
    "open": "not examined",
}

REASONS: tuple[tuple[str, str, str], ...] = (
    (r"Timeout \(>|session-timeout", "machine", "longer than the limit of a test"),
)
"""Pattern of a test's name and its error -> kind, cause. The first that is found counts."""


def reason_of(name: str, why: str) -> tuple[str, str]:
    """Return the kind and the cause of a failure, ``open`` if it was not examined."""
    for pattern, kind, reason in REASONS:
        if re.search(pattern, f"{name}: {why}"):
            return kind, reason
    return "open", ""
