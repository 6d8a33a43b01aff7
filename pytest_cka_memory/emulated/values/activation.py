"""Turn values on for the life of the process."""

from __future__ import annotations

from pytest_cka_memory.core import tried_torch
from pytest_cka_memory.errors import DeviceError

_is_on = False
_reason: str | None = None
"""What torch lacks, if values were to be computed and are not."""


def are_computed() -> bool:
    """Whether values are computed in this process."""
    return _is_on


def warning() -> str | None:
    """Return a warning if the imported torch version cannot compute values; None if it can.

    Also None if torch is not imported yet, or with ``values=off``.
    """
    return None if _reason is None else f"values are not computed: {_reason}"


def turn_on(path: str, *, required: bool) -> bool:
    """Compute values from now on, if the imported version of torch can; return whether it can.

    Args:
        path: of the library of the emulated device, which is loaded.
        required: raise if the torch version cannot; otherwise no values are computed then, and
            :func:`warning` says why.

    Raises:
        DeviceError: names what the torch version lacks, if values are required.
    """
    global _is_on, _reason
    import torch

    from pytest_cka_memory.emulated import torch_private

    missing = torch_private.missing()
    if missing:
        _reason = (
            f"the emulated device computes values with {', '.join(missing)}, which torch "
            f"{torch.__version__} lacks; install one of the versions with which it was tried "
            f"(torch {tried_torch.RANGE}), or write values=off"
        )
        if required:
            raise DeviceError(_reason)
        return False
    from pytest_cka_memory.emulated.values import operators, registration

    functions = operators.Library(path)
    operators.use_library(functions)
    registration.register_all()
    torch_private.disable_fusion()
    functions.compute_values(1)
    _is_on = True
    return True


def register_new_operators() -> None:
    """Compute also the operators of a library that was loaded after torch, such as torchvision."""
    if _is_on:
        from pytest_cka_memory.emulated.values import registration

        registration.register_all()
