"""Let torch's backward threads finish before the interpreter ends.

The thread in which torch runs backward passes on a device releases Python objects after
``backward()`` has returned. If the process ends at that moment, the thread asks for the interpreter
while it shuts down, and the process aborts.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from emulated_cuda import threads
from emulated_cuda.torch_versions import BACKWARD_THREAD

_kept: list[object] = []


def wait_for_backward_threads() -> None:
    """Return when the backward thread of each device holds nothing of earlier passes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if not threads.may_exist(BACKWARD_THREAD.value):
        return
    for index in range(torch.cuda.device_count()):
        # A pass over nothing goes through the queue of the device's thread, behind earlier passes.
        with suppress(RuntimeError):
            leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
            tensors = (leaf, leaf.view(0), torch.empty(0, device=f"cuda:{index}"))
            _kept.append(tensors)  # so that the thread is never the last to release them
            _kept.append(torch.autograd.grad(tensors[1], leaf, tensors[2]))
