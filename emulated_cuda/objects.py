"""Without values, send Python objects between ranks over Gloo instead of NCCL.

``all_gather_object`` and its like send pickled bytes in tensors on the device, and read back sizes
that operators have compared. Without values no operator compares, so sizes would be zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from emulated_cuda.torch_versions import OBJECT_COLLECTIVES


def send_over_gloo() -> None:
    """Have the collectives of objects use a group of Gloo with the same ranks."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        return
    for name in OBJECT_COLLECTIVES.value:
        function = _over_gloo(getattr(distributed, name))
        for module in (distributed, distributed.distributed_c10d):
            setattr(module, name, function)


def _over_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or torch.distributed.group.WORLD
        if group is not None and "nccl" in torch.distributed.get_backend(group):
            given["group"] = _twin(group)
            given.pop("device", None)
        return function(**given)

    return call


@cache
def _twin(group: Any) -> Any:
    """Return a group of Gloo with the same ranks, which all make it at the same call."""
    ranks = torch.distributed.get_process_group_ranks(group)
    return torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
