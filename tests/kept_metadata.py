"""Keeps what each pytest session reads of the installed packages, such as their entry points.

To read these takes a third of a session that runs in a process with pytest already.
"""

import importlib.metadata
from typing import Any


def _kept(name: str) -> property:
    """Return a property of distributions that is read once for each of their folders."""
    read: Any = getattr(importlib.metadata.Distribution, name).fget
    values: dict[str, Any] = {}

    def get(distribution: Any) -> Any:
        folder = getattr(distribution, "_path", None)
        if folder is None:
            return read(distribution)
        if str(folder) not in values:
            values[str(folder)] = read(distribution)
        return values[str(folder)]

    return property(get)


for _name in ("entry_points", "files", "metadata"):
    setattr(importlib.metadata.Distribution, _name, _kept(_name))

# Read them now: what is there before the tests is hidden from the garbage collector.
for _distribution in importlib.metadata.distributions():
    if any(entry_point.group == "pytest11" for entry_point in _distribution.entry_points):
        # The properties read these.
        _distribution.files  # noqa: B018
        _distribution.metadata  # noqa: B018
