"""A sequence of allocations that are many, so each is described only when it is asked for."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar, overload

from pytest_cka_memory.core.allocations import Allocation

T = TypeVar("T")


class LazyAllocations(Sequence[Allocation], Generic[T]):
    """Allocations, each described from what is known of it."""

    def __init__(self, known: Sequence[T]) -> None:
        self._known = known

    @abstractmethod
    def described(self, known: T) -> Allocation:
        """Return the allocation of which this is known."""

    def __len__(self) -> int:
        return len(self._known)

    @overload
    def __getitem__(self, index: int) -> Allocation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Allocation]: ...
    def __getitem__(self, index: int | slice) -> Allocation | list[Allocation]:
        if isinstance(index, slice):
            return [self.described(known) for known in self._known[index]]
        return self.described(self._known[index])
