"""Replace an attribute of a module or class, and restore it without harm to other patches."""

from collections.abc import Callable
from typing import Any


def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], bool]:
    """Replace an attribute by `function`; return a function that restores it.

    That function returns whether it could: if other code has patched the attribute since, its
    patch has to be undone first.
    """
    before = vars(owner).get(name)  # None if the attribute is inherited
    setattr(owner, name, function)

    def undo() -> bool:
        if vars(owner).get(name) is not function:
            return False
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
        return True

    return undo
