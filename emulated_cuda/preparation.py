"""Switch off what torch and Triton cannot do on an emulated device: time kernels.

Compilers time several kernels and choose the fastest. On an emulated device times mean nothing, and
timing would allocate memory, which the user's figures would contain until the compilers' caches on
disk are filled. So the first kernel that the card can run is chosen, and profiles are labelled.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import partial

from emulated_cuda import imports, torch_versions, triton_private

_OPERATOR = 1  # Phase in csrc/emulated.hpp: kernels that are launched now have no effect


def leave_out(path: str) -> None:
    """Let Triton and Inductor choose without measuring, as soon as the program imports them.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    from emulated_cuda import torch_private  # not before torch is imported

    set_phase = ctypes.PyDLL(path).emulated_set_phase

    @contextlib.contextmanager
    def without_effect() -> Iterator[None]:
        before = set_phase(_OPERATOR)
        try:
            yield
        finally:
            set_phase(before)

    imports.call_after(
        triton_private.MODULE, partial(triton_private.choose_first_valid, without_effect)
    )
    for module in torch_versions.MEASURING.value:
        imports.call_after(module, partial(torch_private.measure_no_kernels, module))


NO_TIMES = "emulated: no device times (those shown are times of calls on the host)"


def label_profiles() -> None:
    """Let tables and traces of torch's profiler say that their device times are not a card's."""
    from emulated_cuda import torch_private

    torch_private.label_profiles(NO_TIMES)
