"""A sequence of many items, each of which is described only when it is asked for."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

Known = TypeVar("Known")
Item = TypeVar("Item")


class LazySequence(Sequence[Item], Generic[Known, Item]):
    """Allocations or groups of them, each described from what is known of it."""

    def __init__(self, known: Sequence[Known]) -> None:
        self._known = known

    @abstractmethod
    def described(self, known: Known) -> Item:
        """Return the item of which this is known."""

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.described(known) for known in self._known[index]]
        return self.described(self._known[index])
