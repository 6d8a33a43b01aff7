"""Read a device's memory. Only this package asks a device anything.

:class:`Meter` and :class:`Reading` are public, for plugins that bring a meter of their own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_cka_memory.meters.base import Meter, Reading

__all__ = ["Meter", "Reading"]


def __getattr__(name: str) -> Any:
    # Imported when asked for, because every session imports a module of this package.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pytest_cka_memory.meters import base

    return getattr(base, name)
