"""Load the emulated device into this process, state what it emulates, and clean up at the end."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import pickle
import shlex
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from emulated_cuda import activation, loading, this_process
from emulated_cuda.cards import CONTEXT_BYTES, DEFAULT_CARD, Card, card_of
from emulated_cuda.errors import DeviceError
from emulated_cuda.loading import records
from emulated_cuda.loading.library import Library, check_wanted
from emulated_cuda.torch_versions import BACKWARD_THREAD, INDUCTOR_SETTINGS

TRITON_DRIVER = "TRITON_LIBCUDA_PATH"
"""The environment variable that names the folder in which Triton looks for the driver."""
_kept: list[object] = []


def wait_for_backward_threads() -> None:
    """Return when the backward thread of each device holds nothing of earlier passes."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if not this_process.thread_may_exist(BACKWARD_THREAD.value):
        return
    for index in range(torch.cuda.device_count()):
        # A pass over nothing goes through the queue of the device's thread, behind earlier passes.
        with suppress(RuntimeError):
            leaf = torch.empty(0, device=f"cuda:{index}", requires_grad=True)
            tensors = (leaf, leaf.view(0), torch.empty(0, device=f"cuda:{index}"))
            _kept.append(tensors)  # so that the thread is never the last to release them
            _kept.append(torch.autograd.grad(tensors[1], leaf, tensors[2]))
    # The thread goes on for a moment after the pass. If it wants the interpreter's lock while the
    # interpreter ends, the thread is ended amid C++, and that aborts the process.
    this_process.wait_until_asleep(BACKWARD_THREAD.value)


@dataclass(frozen=True)
class Loaded:
    """What this process emulates."""

    card: Card
    devices: int
    """How many such cards, before ``CUDA_VISIBLE_DEVICES`` is applied."""
    total_bytes: int
    """Memory of each device, of which the CUDA context takes some."""
    values: bool | None = True
    """Whether values are asked for; None to compute them if the torch version can."""
    late_events: bool = False
    """Whether an event is done only when the host must know that it is."""

    @property
    def title(self) -> str:
        """The device as a report should name it; it says that there is no GPU."""
        late = ", events as late as possible" if self.late_events else ""
        return f"emulated {self.card.title} (no GPU{late})"


_loaded: Loaded | None = None
_library: Library | None = None  # a reference for the life of the process


def loaded() -> Loaded | None:
    """Return what this process emulates.

    Returns:
        Its ``card``, how many ``devices`` it has, and the ``title`` that reports show; None if this
        process emulates nothing.

    >>> import emulated_cuda
    >>> emulated_cuda.load("t4", devices=2)
    >>> emulated_cuda.loaded().title
    'emulated NVIDIA T4 (no GPU)'
    >>> emulated_cuda.loaded().devices
    2
    """
    return _loaded


def load(
    card: str = DEFAULT_CARD,
    devices: int = 1,
    total_bytes: int | None = None,
    values: bool | None = True,
    late_events: bool = False,
) -> None:
    """Make torch find emulated CUDA devices in this process, and in the Python processes it starts.

    Call it before torch is imported, or at least before torch is asked for devices. A second call
    with the same arguments changes nothing.

    >>> import emulated_cuda
    >>> emulated_cuda.load("h100", devices=2)
    >>> import torch
    >>> torch.cuda.get_device_name(1)
    'NVIDIA H100 80GB HBM3'

    Args:
        card: a key of ``CARDS``.
        devices: how many such cards there are, before ``CUDA_VISIBLE_DEVICES`` is applied; 1 to 16.
        total_bytes: memory of each; None for that of the card. The CUDA context takes 512 MB of
            it.
        values: whether operators compute values. False: device memory holds what was copied there
            in pieces of up to 1 MB, and zeros elsewhere, and small reads such as ``.item()`` return
            0 after an operator.
            None: as an earlier call has chosen; the first computes them if the torch version can.
        late_events: whether an event is done only when the host must know that it is: it has waited
            for it, or over 1,024 launches were given to its stream since. The allocator then has
            blocks back that other streams used as late as a card may return them, so the reserve
            is the largest that the order in time allows. False: work is done when it is given.

    Raises:
        DeviceError: if the device cannot be emulated here, or no longer. The message says why, what
            was found and what to do. If values are required and the torch version cannot compute
            them, the import of torch raises it.
    """
    global _loaded, _library
    chosen_card = card_of(card)
    total = chosen_card.total_bytes if total_bytes is None else total_bytes
    check_wanted(chosen_card, devices, total)
    if values is None and _loaded is not None:
        values = _loaded.values
    wanted = Loaded(chosen_card, devices, total, values, late_events)
    if _loaded is not None:
        _check_same(_loaded, wanted)
        return
    _library = Library(chosen_card, devices, total)
    _loaded = wanted
    _library.refuse_launches(values is not False)
    if late_events:
        _library.set_late_events()
    _library.leave_out_copies(values is False)
    prepare(_library.path)
    this_process.call_after("torch", _prepare_torch)
    loading.load_in_children(card, devices, total, values, late_events)
    _library.join(loading.setting_of(os.environ)["machine"])
    records.write_at_exit(_library, chosen_card, total)
    record_until_exit()
    atexit.register(wait_for_backward_threads)


def _check_same(existing: Loaded, wanted: Loaded) -> None:
    if _compared(existing) != _compared(wanted):
        raise DeviceError(
            f"this process already emulates {_described(existing, wanted)}, so it cannot emulate "
            f"{_described(wanted, existing)} too; start another process for that device"
        )


def _compared(loaded: Loaded) -> tuple[object, ...]:
    without_values = loaded.values is False
    memory = (loaded.devices, loaded.total_bytes, loaded.late_events)
    return (loaded.card, *memory, without_values)


def _described(loaded: Loaded, other: Loaded) -> str:
    """Describe a device in words; name its values and events only if `other` differs in them."""
    values = late = ""
    if loaded.late_events != other.late_events:
        late = ", events late" if loaded.late_events else ", events at once"
    if (loaded.values is False) != (other.values is False):
        values = ", without values" if loaded.values is False else ", with values"
    memory = f"{loaded.total_bytes >> 20:,} MB each"
    return f"{loaded.devices} × {loaded.card.title} with {memory}{values}{late}"


def _prepare_torch() -> None:
    """Change what torch, which is imported now, does with the emulated device."""
    assert _loaded is not None
    assert _library is not None
    _library.refuse_launches(False)
    activation.leave_out(_library.path)
    activation.label_profiles()
    values = _loaded.values
    if values is False or not activation.turn_on(_library.path, required=values is True):
        activation.work_without_values()


def prepare(library: str) -> None:
    """Set the variables of this process and its children.

    Args:
        library: path of the emulated driver.
    """
    for name, value in INDUCTOR_SETTINGS.value.items():
        os.environ.setdefault(name, value)
    if TRITON_DRIVER not in os.environ:
        os.environ[TRITON_DRIVER] = str(folder_of_driver(library))


def folder_of_driver(library: str) -> Path:
    """Return a folder in which the library has the names of the driver that Triton links against.

    All processes of a user share one folder per library, and none removes it: a process that is
    killed could not, and others may be linking. A folder in a place where everybody may write is
    used only if nobody else can write into it; otherwise this process gets a new one.
    """
    digest = hashlib.sha256(os.fsencode(library)).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"emulated-cuda-{os.getuid()}-{digest}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_private(folder):
        folder = Path(tempfile.mkdtemp(prefix="emulated-cuda-"))
    link_driver(folder, library)  # the target never differs: the folder's name depends on it
    return folder


def link_driver(folder: Path, library: str) -> None:
    """Give the library the names of the driver in `folder`, unless it has them."""
    for name in ("libcuda.so", "libcuda.so.1"):  # which one depends on the version of Triton
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(library)


def _is_private(folder: Path) -> bool:
    """Whether `folder` is a folder of this user, no link, that nobody else can write into."""
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not others_write


SNAPSHOT_SETTING = "snapshot"
"""The path of the file in the setting of :mod:`emulated_cuda.loading`."""


def record_until_exit() -> None:
    """Record allocations and write them when this process ends, if the environment says so."""
    path = loading.setting_of(os.environ).get(SNAPSHOT_SETTING)
    if path:
        this_process.call_after("torch", _record)
        atexit.register(_write, _claimed(Path(path)), os.getpid())


def _claimed(path: Path) -> Path:
    """Return the file of this process: the plain name for the first, which is the program itself.

    A rank gets a name with its number, and any other process one with the number of the process.
    """
    rank = os.environ.get("RANK", "")
    if rank.isdigit():
        return path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    try:
        path.touch(exist_ok=False)
    except OSError:
        return path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
    return path


def _record() -> None:
    from emulated_cuda import torch_private

    torch_private.record_history_when_initialized()


def _write(target: Path, process: int) -> None:
    torch = sys.modules.get("torch")
    if process != os.getpid():  # forked from the one that has the file
        return
    if torch is None or not torch.cuda.is_initialized():
        with suppress(OSError):
            if target.stat().st_size == 0:
                target.unlink()
        return
    from emulated_cuda import torch_private

    with suppress(Exception):  # a program that was measured must not end by an error of this
        # Those who read the file may then name the card and the program.
        content = pickle.dumps({**torch_private.history(), "emulated_cuda": _origin()})
        target.write_bytes(content)
        shown = os.path.relpath(target) if target.is_relative_to(Path.cwd()) else str(target)
        print(
            f"emulated_cuda: wrote {shown}; run python -m pytest_cka_memory snapshot {shown} to "
            "read it",
            file=sys.stderr,
        )


def _origin() -> dict[str, str]:
    """Return the card, and the script with its arguments, unless this process runs a module.

    If the card has other memory than usual, also how much of it a program can have.
    """
    assert _loaded is not None
    is_script = getattr(sys.modules.get("__main__"), "__spec__", None) is None
    program = shlex.join(sys.argv) if is_script else ""
    origin = {"card": _loaded.card.name, "program": program}
    if _loaded.total_bytes != _loaded.card.total_bytes:
        origin["usable_mb"] = str((_loaded.total_bytes - CONTEXT_BYTES) >> 20)
    return origin
