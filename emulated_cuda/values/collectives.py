"""Collectives: NCCL moves bytes itself, so only what is not known must not be sent.

What a rank receives is known, because no rank sends a value that was not computed.
"""

from __future__ import annotations

from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.values import staleness
from emulated_cuda.values.operators import Kernel

NAMESPACE = "c10d"
_RECEIVING = ("recv_", "recv_any_source_", "barrier", "monitored_barrier_")
"""Operators that read none of their tensors."""


def checking(name: str, operator: Any, original: Kernel) -> Kernel:
    """Return a kernel that raises if a tensor that is sent was not computed.

    Args:
        name: of the operator, such as ``c10d::allreduce_``.
        operator: the operator of torch.
        original: calls the process group.
    """
    base = name.removeprefix(f"{NAMESPACE}::")
    names = [argument.name for argument in torch_private.schema_of(operator).arguments]
    read = [] if base in _RECEIVING else [each for each in names if not each.startswith("output")]
    is_broadcast = base == "broadcast_"

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not staleness.is_possible():
            return original(keyset, *args, **kwargs)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        if not is_broadcast or _is_root(named):
            staleness.check([named[key] for key in read if key in named])
        result = original(keyset, *args, **kwargs)
        staleness.propagate((), named)
        return result

    return kernel


def _is_root(named: dict[str, Any]) -> bool:
    group = torch.distributed.ProcessGroup.unbox(named["process_group"])
    return bool(group.rank() == named["root_rank"])
