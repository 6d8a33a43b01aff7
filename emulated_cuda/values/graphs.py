"""CUDA graphs: what operators would compute during a capture is recorded, and computed at a replay.

During a capture torch's own operators run, which allocate from the graph's pool. Nothing is
computed. Each launch of the graph computes all that was recorded, at the same addresses
(csrc/graphs.cpp).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from emulated_cuda import torch_private
from emulated_cuda.errors import StaleValueError
from emulated_cuda.values import operators, staleness
from emulated_cuda.values.operators import Draw, tensors_in

_FAILED = 719  # kLaunchFailed in csrc/emulated.hpp


@dataclass(frozen=True)
class Step:
    """Something that a replay computes."""

    compute: Callable[[int], None]
    """Gets the seed of the random numbers of this replay; 0 if it draws none."""
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    """Addresses on the device, and how many bytes."""
    draw: Draw | None = None
    """The random numbers that it draws, if any."""


class _Thread(threading.local):
    error: BaseException | None = None
    offsets: Mapping[torch.Generator, int] = MappingProxyType({})
    """Generators -> their offsets before the replay that this thread has begun."""


_thread = _Thread()
_steps: dict[int, list[Step]] = {}
"""Number of a graph -> what it computes."""
_generators: dict[int, list[torch.Generator]] = {}
"""Number of a graph that draws random numbers, and that was replayed -> its generators."""
_drawing: set[int] = set()
"""The numbers of the graphs that draw random numbers."""
_library: Any = None
_open_captures = ctypes.c_uint64(0)
_callbacks: list[Any] = []
"""References for the life of the process."""


def start(path: str) -> None:
    """Record captures from now on.

    Args:
        path: of the library of the emulated device, which is loaded.
    """
    global _library, _open_captures
    _library = ctypes.PyDLL(path)
    _library.emulated_open_captures.restype = ctypes.POINTER(ctypes.c_uint64)
    _library.emulated_capture_of.restype = ctypes.c_uint64
    _library.emulated_capture_of.argtypes = (ctypes.c_void_p,)
    _library.emulated_invalidate_capture.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    _library.emulated_repeat_calls.restype = ctypes.c_char_p
    _library.emulated_repeat_calls.argtypes = (ctypes.c_size_t,)
    _open_captures = _library.emulated_open_captures().contents
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    _callbacks[:] = [
        ctypes.CFUNCTYPE(ctypes.c_int, number)(_replay),
        ctypes.CFUNCTYPE(None, number)(_forget),
        ctypes.CFUNCTYPE(None, number, ctypes.c_char_p, pointer, pointer, ctypes.c_size_t)(_note),
    ]
    _library.emulated_on_graphs(*_callbacks)
    torch_private.call_around_replays(_raising_own_error)


def stop() -> None:
    """Forget the callbacks: graphs may be destroyed after Python has ended."""
    if _library is not None:
        _library.emulated_on_graphs(None, None, None)


def is_capturing() -> bool:
    """Whether this thread's stream captures a graph. It is fast if no stream does."""
    return _open_captures.value != 0 and torch.cuda.is_current_stream_capturing()


def capture_of(stream: int | None) -> int:
    """Return the number of the graph that a stream captures; 0 if it captures none."""
    return int(_library.emulated_capture_of(stream)) if _open_captures.value else 0


def record(
    compute: Callable[[int], None],
    reads: Any = (),
    writes: Any = (),
    *,
    number: int | None = None,
    draw: Draw | None = None,
) -> None:
    """Add a step to the graph that this thread's stream captures, or to that with a number.

    Args:
        compute: what a replay calls with a seed; it must keep no tensor of the user alive.
        reads: tensors that it reads.
        writes: tensors that it writes.
        number: of the graph.
        draw: the random numbers that it draws.
    """
    if number is None:
        number = capture_of(torch.cuda.current_stream().cuda_stream)
    step = Step(compute, _bytes_of(reads), _bytes_of(writes), draw)
    _steps.setdefault(number, []).append(step)
    if draw is not None:
        _generators.pop(number, None)
        _drawing.add(number)


def refuse(name: str) -> None:
    """Raise if this thread's stream captures: an operator cannot be recorded.

    The capture is invalid then, so that ending it fails, as on a card.

    Raises:
        RuntimeError: names the operator and what to do.
    """
    if is_capturing():
        problem = (
            f"{name} cannot be captured in a CUDA graph on the emulated device, because the "
            "memory that it takes is not known or depends on values; leave it out of the graph, "
            "or use a GPU"
        )
        stream = torch.cuda.current_stream().cuda_stream
        _library.emulated_invalidate_capture(stream, problem.encode())
        raise RuntimeError(problem)


def _bytes_of(values: Any) -> tuple[tuple[int, int], ...]:
    return (
        *(
            (tensor.data_ptr(), tensor.numel() * tensor.element_size())
            for tensor in tensors_in(values)
            if tensor.layout is torch.strided and tensor.numel()
        ),
    )


# ---- What the library calls ----


def _replay(number: int) -> int:
    """Compute all steps of a graph; return 0 or an error of the runtime."""
    try:
        steps = _steps.get(number, [])
        may_be_stale = staleness.is_possible()
        if may_be_stale:
            _check(steps)
        seeds = operators.seeds_of_replay([step.draw for step in steps], _thread.offsets)
        with torch.no_grad(), torch_private.without_modes():
            for step, seed in zip(steps, seeds, strict=True):
                step.compute(seed)
        if may_be_stale:
            for start, size in {written for step in steps for written in step.writes}:
                staleness.note_received(start, size)
    except BaseException as error:
        _thread.error = error
        _library.emulated_fail_work(f"{type(error).__name__}: {error}".encode(), _FAILED)
        _library.cudaGetLastError()
        return _FAILED
    return 0


def _check(steps: Iterable[Step]) -> None:
    """Raise if a graph reads values that are not known and that it has not written before."""
    written: set[tuple[int, int]] = set()
    for step in steps:
        for start, size in step.reads:
            if (start, size) not in written:
                reason = staleness.reason_of_bytes(start, size)
                if reason is not None:
                    raise StaleValueError(reason)
        written.update(step.writes)


def _forget(number: int) -> None:
    _steps.pop(number, None)
    _generators.pop(number, None)
    _drawing.discard(number)


def _note(number: int, kernel: bytes | None, target: int, source: int, size: int) -> None:
    """Record work outside operators: a kernel that is not known, a call of NCCL, or a copy."""
    if kernel is not None:
        record(lambda seed: _library.emulated_note_work(kernel), number=number)
    elif not source:
        record(lambda seed: _repeat_calls(target), number=number)
    else:

        def copy(seed: int) -> None:
            ctypes.memmove(target, source, size)

        record(copy, number=number)


def _repeat_calls(number: int) -> None:
    """Make calls of NCCL that were captured, and wait for them."""
    problem = _library.emulated_repeat_calls(number)
    if problem is not None:
        raise RuntimeError(problem.decode())


def _raising_own_error(replay: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replay a graph; an error in it is raised as it is, and not as one of the launch."""
    _thread.error = None
    _thread.offsets = _offsets()
    try:
        return replay(*args, **kwargs)
    except RuntimeError:
        error, _thread.error = _thread.error, None
        if error is None:
            raise
        raise error from None
    finally:
        _thread.offsets = MappingProxyType({})


def _offsets() -> dict[torch.Generator, int]:
    """Return the offsets of generators that graphs use, before torch advances them for a replay."""
    if is_capturing():  # during a capture torch raises if the offset of a generator is read
        return {}
    for number in _drawing - _generators.keys():
        draws = [step.draw for step in _steps.get(number, ()) if step.draw is not None]
        _generators[number] = operators.share_generators(draws)
    return {
        drawn: drawn.get_offset() for generators in _generators.values() for drawn in generators
    }
