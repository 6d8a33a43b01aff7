"""The torch versions with which this project was tried."""

import re

OLDEST_TRIED = (2, 9)
NEWEST_TRIED = (2, 15)
"""Major and minor version; raise it after all tests have passed with a newer one."""

RANGE = f"{OLDEST_TRIED[0]}.{OLDEST_TRIED[1]} to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}"
"""The range as texts name it."""


def warning_about(version: str | None) -> str | None:
    """Return what to tell the user of a version that is newer than those tried; otherwise None.

    Args:
        version: such as ``2.16.0.dev20270110+cu132``; None if torch is not installed.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= NEWEST_TRIED:
        return None
    return (
        f"not yet tried with torch {numbers[1]}.{numbers[2]}; figures of torch's allocator are "
        f"still torch's own"
    )
