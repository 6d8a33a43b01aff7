"""Waits for the threads in which torch runs backward passes on devices other than the CPU.

When a pass fails, its caller hears of it at once, while the thread still holds the exception, and
with it every frame that it passed and their tensors. It lets go when it is next given the
interpreter, in a thousandth of a second or after a reading.
"""

import threading
from contextlib import suppress
from pathlib import Path

import torch

from pytest_cka_memory.meters import torch_private

_THREADS = Path("/proc/self/task")
_LONGEST_WAIT_SECONDS = 1


def wait_until_ended(device: torch.device) -> None:
    """Return when `device`'s thread holds nothing of earlier passes; at the latest in a second.

    A pass over nothing goes through its queue. Neither that nor its tensors allocate anything.
    """
    if (
        torch_private.graph_task_id() != -1 or not _may_have_begun()
    ):  # in a pass: it would wait for us
        return
    # A thread of its own: the first node of a thread is the last of the queue, and no mode is on.
    waiting = threading.Thread(target=_run_empty_pass, args=(device,), daemon=True)
    waiting.start()
    waiting.join(_LONGEST_WAIT_SECONDS)


def _run_empty_pass(device: torch.device) -> None:
    with suppress(RuntimeError):  # a device that cannot do this is measured without
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(leaf.view(0), leaf, torch.empty(0, device=device))


def _may_have_begun() -> bool:
    """Whether torch's threads run, as far as the system tells.

    To start them would be a change to the test: a process that is then forked can run no backward
    pass any more.
    """
    if not _THREADS.is_dir():
        return True
    return any(
        _name(thread).startswith(torch_private.BACKWARD_THREAD) for thread in _THREADS.iterdir()
    )


def _name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text("utf-8", errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
