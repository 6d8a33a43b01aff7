"""Leave out the random values of large parameters, where no values are computed with them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from pytest_cka_memory.repair.trials import replaced

_RANDOM = (
    *("uniform_", "normal_", "trunc_normal_"),
    *("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
)
_LARGE = 2**16
"""Elements. Smaller parameters cost little, and large ones are in memory that is zero at first."""


@contextmanager
def without_random_values() -> Iterator[None]:
    """Leave large parameters on the host as they are allocated, in the block.

    A model of 124 million parameters takes a second to initialize, and its step on an emulated
    device without values less. What is made on the device is not concerned: it may need memory.
    """

    def left_out(function: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.device.type == "cpu" and tensor.numel() >= _LARGE:
                return tensor
            return function(tensor, *args, **kwargs)

        return initialize

    with ExitStack() as stack:
        for name in _RANDOM:
            function = getattr(torch.nn.init, name)
            stack.enter_context(replaced(torch.nn.init, name, left_out(function)))
        yield
