"""Wait for the threads in which torch runs backward passes on devices other than the CPU.

When a backward pass fails, its caller gets the exception at once, while the thread still references
it, and with it every frame of the traceback and their tensors. The thread drops that reference when
it next gets the GIL: within about 1 ms, but possibly after a reading.
"""

import threading
from contextlib import suppress

import torch

from emulated_cuda import threads
from pytest_cka_memory.meters import torch_private

_LONGEST_WAIT_SECONDS = 1


def wait_until_ended(device: torch.device) -> None:
    """Wait until `device`'s thread holds nothing of earlier backward passes, for 1 s at most.

    To do so it runs a backward pass over an empty tensor in the queue of that thread. Neither the
    pass nor its tensors allocate memory.
    """
    # Inside a backward pass, waiting for its thread would be a deadlock. The threads must not be
    # started here: once they run, a forked child process cannot run backward passes.
    is_inside = torch_private.graph_task_id() != -1
    if is_inside or not threads.may_exist(torch_private.BACKWARD_THREAD):
        return
    # In a new thread: no dispatch mode is active there, and its node is the last in the queue.
    waiting = threading.Thread(target=_run_empty_pass, args=(device,), daemon=True)
    waiting.start()
    waiting.join(_LONGEST_WAIT_SECONDS)


def _run_empty_pass(device: torch.device) -> None:
    with suppress(RuntimeError):  # a device that cannot run this is measured without it
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.view(0), leaf, torch.empty(0, device=device))
