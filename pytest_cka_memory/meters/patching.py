"""Replace an attribute of a module or class, and restore it without harm to other patches."""

from collections.abc import Callable
from typing import Any


class Patch:
    """A replacement of an attribute of a module or class.

    It is created before it is applied, so that it can be undone even if an exception of a signal
    handler comes in between.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner, self._name, self._function = owner, name, function
        self._before = vars(owner).get(name)  # None if the attribute is inherited

    def fits(self) -> bool:
        """Whether the attribute is what it was when this was created, so that it can be applied."""
        return vars(self._owner).get(self._name) is self._before

    def apply(self) -> None:
        """Replace the attribute."""
        setattr(self._owner, self._name, self._function)

    def undo(self) -> bool:
        """Restore the attribute; return whether that was possible.

        If other code has patched the attribute since, its patch has to be undone first.
        """
        current = vars(self._owner).get(self._name)
        if current is self._before:  # it was never applied, or undone without this returning
            return True
        if current is not self._function:
            return False
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)
        return True


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Replace an attribute by `function`; return a function that restores it, as `Patch.undo`."""
    patch = Patch(owner, name, function)
    patch.apply()
    return patch.undo
