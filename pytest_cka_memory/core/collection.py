"""Which tests exist, as far as the collection of a session has shown."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Collection:
    """What pytest has collected, before it deselected tests."""

    tests: frozenset[str] = frozenset()
    """Every test that was collected, including those that were deselected later."""
    complete: frozenset[str] = frozenset()
    """Files and folders, relative to pytest's root, of which every part was collected."""

    def shows_gone(self, nodeid: str, root: Path) -> bool:
        """Whether a test does not exist, because all that lies beside it was collected.

        A file must have been collected completely. If the file does not exist, its folder must have
        been, or the nearest folder that exists; `root` is pytest's root folder.
        """
        if nodeid in self.tests:
            return False
        file = PurePosixPath(file_of(nodeid))
        existing = next((path for path in (file, *file.parents) if (root / path).exists()), file)
        return str(existing) in self.complete


def merged(collections: Iterable[Collection]) -> Collection:
    """Return what several processes have collected: tests of any, completeness in all."""
    found = list(collections)
    if not found:
        return Collection()
    return Collection(
        frozenset().union(*(each.tests for each in found)),
        reduce(frozenset.intersection, (each.complete for each in found)),
    )


def file_of(nodeid: str) -> str:
    """Return the file of a test, or of a class in it."""
    return nodeid.partition("::")[0]
