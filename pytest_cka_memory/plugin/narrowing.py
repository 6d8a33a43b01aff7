"""Whether a session may have left out tests of the files that it collected."""

import pytest

narrowed_key = pytest.StashKey[bool]()
"""Whether tests were deselected."""


def is_narrowed(config: pytest.Config) -> bool:
    """Whether tests of a collected file may be missing from this session."""
    return (
        config.stash.get(narrowed_key, False)
        or any("::" in arg for arg in config.args)
        or bool(config.getoption("lf", False))  # --last-failed deselects without calling the hook
    )
