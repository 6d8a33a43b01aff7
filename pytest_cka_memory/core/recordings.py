"""When the blocks of a region were allocated and freed, as a meter has recorded it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pytest_cka_memory.core.allocations import RecordedSite


class RecordedBlock(NamedTuple):
    """A block, or several that were merged. Events are numbered from 1, in their order."""

    bytes: int
    """Of merged blocks: what they had on average between their first and last event."""
    begin: int
    """The event of its allocation; 0 if it is older than the region."""
    end: int
    """The event of its release; 0 if it was live at the region's end."""
    stack: int
    """Identifies where it was allocated."""
    allocations: int
    """How many were merged into it, or 1."""
    on_host: bool
    """Whether it is memory of the host beside the measured device."""
    inside: int
    """What allocated it if no tensor owned it: an index into :attr:`Recording.insides`."""


@dataclass(frozen=True)
class Recording:
    """What a region has recorded. The blocks can be read once, while the region is open."""

    blocks: Iterable[RecordedBlock]
    events: int
    """Number of allocations and releases."""
    peak_event: int
    """The event at which the device's level was highest; 0 if that was at the region's start."""
    peak_bytes: int
    """The level then."""
    start_bytes: int
    """The device's level at the start."""
    host_start_bytes: int
    """The same of the host, if another device is measured."""
    site_of: Callable[[int], RecordedSite | None]
    """Returns where the blocks of a stack were allocated."""
    module_path: Callable[[int], str]
    """Returns the path of a module that ran, by its identity; empty if it is unknown."""
    insides: tuple[str | None, ...]
    """What can allocate memory that no tensor owns."""
    merged: int = 0
    """Number of allocations that were merged with others, because there were too many."""
    merged_bytes: int = 0
    """No merged block is larger than this."""
    lost: int = 0
    """Number of allocations that are missing because even merging left too many."""
