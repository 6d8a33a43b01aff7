"""Torch's own CUDA operators: how they run, and the random numbers that they draw.

An operator of torch allocates, and does not change device memory here.

Random numbers are those of the CPU's algorithm, from the state of the CUDA generator. The seed of
each operator is made from the seed and the offset of that generator, which torch's own code
advances. So ``torch.cuda.manual_seed`` and ``torch.cuda.set_rng_state`` repeat numbers. The first
operator after ``torch.manual_seed`` gives the same numbers as on the CPU.

A replay of a CUDA graph begins at the offset that the generator has then, and each operator in it
draws as many numbers as outside of a graph: so both give the same numbers. How far an operator
advances the offset cannot be read during a capture. It is known from a run outside, as of a
warm-up, or is what the replay advances the generator by and the others do not.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from emulated_cuda.torch_versions import REFUSED

Kernel = Callable[..., Any]
OUTSIDE, OPERATOR, COPY = 0, 1, 2  # Phase in csrc/emulated.hpp


class _Thread(threading.local):
    """The operator that runs in a thread: its arguments, or None."""

    arguments: tuple[Any, ...] | None = None
    checks_pass = False
    """Whether a truth value that the operator reads back is a check, true if it may go on."""
    has_checked = False
    """Whether the operator that runs, or ran last, has read back such a check."""


thread = _Thread()


class Unavailable(Exception):  # noqa: N818  never leaves this package
    """The library has no emulation of what the operator calls, such as cuSOLVER."""


class Library:
    """The functions of csrc/values.cpp; each call takes less than a microsecond."""

    def __init__(self, path: str) -> None:
        functions = ctypes.PyDLL(path)  # keeps the interpreter's lock
        self.set_phase = functions.emulated_set_phase
        self.compute_values = functions.emulated_compute_values
        self.announce = functions.emulated_announce
        self.announce.argtypes = (ctypes.c_int64,)
        self.forget_answers = functions.emulated_forget_answers
        self.zero = functions.emulated_zero
        self.zero.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        functions.emulated_unknown_work.restype = ctypes.POINTER(ctypes.c_uint64)
        self.unknown_work = functions.emulated_unknown_work().contents
        self._unknown_name = functions.emulated_unknown_name
        self._unknown_name.argtypes = (ctypes.c_char_p, ctypes.c_size_t)

    def unknown_name(self) -> str:
        """Return the name of the last kernel that ran outside of any operator."""
        text = ctypes.create_string_buffer(512)
        self._unknown_name(text, len(text))
        return text.value.decode(errors="replace")


_library: Library | None = None


def use_library(library: Library) -> None:
    """Use these functions from now on."""
    global _library
    _library = library


def library() -> Library:
    """Return the functions of the loaded library."""
    assert _library is not None
    return _library


def run(
    original: Kernel,
    keyset: Any,
    args: Any,
    kwargs: Any,
    phase: int = OPERATOR,
    *,
    checks_pass: bool = False,
) -> Any:
    """Run torch's kernel in this thread without changing what its arguments contain.

    Args:
        original: the kernel.
        keyset: what it gets from the dispatcher, before the arguments.
        args: its positional arguments.
        kwargs: its other arguments.
        phase: what its copies and reads do.
        checks_pass: answer the checks of its arguments that it reads back with true.

    Raises:
        Unavailable: if it calls a library that is not emulated.
    """
    assert _library is not None
    thread.arguments = args
    thread.checks_pass = checks_pass
    thread.has_checked = False
    _library.set_phase(phase)
    try:
        return original(keyset, *args, **kwargs)
    except RuntimeError as error:
        if not REFUSED.value.search(str(error)):
            raise
        raise Unavailable(str(error)) from None
    finally:
        _library.set_phase(OUTSIDE)
        thread.arguments = None


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in arguments or results of an operator."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def is_argument_of_running(tensor: torch.Tensor) -> bool:
    """Whether the memory of `tensor` is that of an argument, so that its values are known."""
    if thread.arguments is None:
        return False
    address = tensor.untyped_storage().data_ptr()
    return any(
        argument.untyped_storage().data_ptr() == address
        for argument in tensors_in(thread.arguments)
        if argument.layout is torch.strided
    )


_SMALLEST_STEP = 4  # offsets are multiples of it
_MOST_ADVANCES = 4096
_lock = threading.RLock()
_advances: dict[Hashable, int] = {}
"""An operator with the form of its arguments -> by how much torch advances the offset for it."""


@dataclass(eq=False)
class Draw:
    """The random numbers that an operator draws in a CUDA graph.

    Attributes:
        generator: a CUDA generator with the state that the operator draws from. The user may give
            his generator another one later.
        form: what decides by how much the operator advances the offset.
    """

    generator: torch.Generator
    form: Hashable


def is_random(operator: Any) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def generator_of(args: Any, kwargs: Any) -> torch.Generator | None:
    """Return the CUDA generator that an operator uses: an argument, or that of its device."""
    values = (*args, *kwargs.values())
    for value in values:
        if type(value) is torch.Generator:  # isinstance would take a microsecond
            return value if value.device.type == "cuda" else None
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return torch.cuda.default_generators[value.device.index]
    return torch.cuda.default_generators[torch.cuda.current_device()]


def seed_of(generator: torch.Generator) -> int:
    """Return the seed for the next numbers of a CUDA generator."""
    return mixed(generator.initial_seed(), generator.get_offset())


def mixed(seed: int, offset: int) -> int:
    """Return one seed for a seed and an offset; the seed itself for the first numbers."""
    return seed if offset == 0 else hash((seed, offset)) & (2**63 - 1)


def advance(generator: torch.Generator, before: int, form: Hashable) -> None:
    """Note how far an operator has advanced a generator; one that has not is advanced here.

    So no numbers come twice.

    Args:
        generator: a CUDA generator.
        before: its offset before the operator.
        form: of the operator, as `form_of` returns it.
    """
    by = generator.get_offset() - before
    if len(_advances) >= _MOST_ADVANCES:
        _advances.clear()
    _advances[form] = by
    if by == 0:
        generator.set_offset(before + _SMALLEST_STEP)


def form_of(name: str, args: Any, kwargs: Any) -> Hashable:
    """Return what decides how many numbers an operator draws: its name and its arguments."""
    return name, *map(_form, args), *((key, _form(value)) for key, value in kwargs.items())


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if value.is_nested:  # it has neither one shape nor strides
            return value.dtype, value.numel(), value.get_device()
        strides = value.stride() if value.layout is torch.strided else ()
        return value.dtype, value.shape, strides, value.get_device()
    if isinstance(value, (list, tuple)):
        return (*map(_form, value),)
    return None if isinstance(value, torch.Generator) else value


def share_generators(draws: Sequence[Draw]) -> list[torch.Generator]:
    """Let draws from one state have one generator, and return these generators.

    Which generators share a state can be asked only through their offsets, outside of a capture.
    """
    distinct: list[torch.Generator] = []
    for draw in draws:
        offset, before = draw.generator.get_offset(), [each.get_offset() for each in distinct]
        draw.generator.set_offset(offset + _SMALLEST_STEP)
        after = [each.get_offset() for each in distinct]
        draw.generator.set_offset(offset)
        same = [each for each, a, b in zip(distinct, before, after, strict=True) if a != b]
        if same:
            draw.generator = same[0]
        else:
            distinct.append(draw.generator)
    return distinct


def seeds_of_replay(
    draws: Sequence[Draw | None], offsets: Mapping[torch.Generator, int]
) -> list[int]:
    """Return a seed for each step of a graph; 0 for those that draw no numbers.

    The generators are left where the same operators would leave them outside of a graph.

    Args:
        draws: of each step, in their order.
        offsets: of the generators before torch has advanced them for this replay.
    """
    seeds = [0] * len(draws)
    for generator in dict.fromkeys(draw.generator for draw in draws if draw is not None):
        after = generator.get_offset()
        at = offsets.get(generator, after)
        forms = [draw.form for draw in draws if draw is not None and draw.generator is generator]
        by = _advances_of(forms, after - at)
        steps = (i for i, draw in enumerate(draws) if draw and draw.generator is generator)
        for step, form in zip(steps, forms, strict=True):
            seeds[step] = mixed(generator.initial_seed(), at)
            at += by[form]
        # Some operators draw here for which torch does not advance the offset: it is advanced now.
        if at > after:
            generator.set_offset(at)
    return seeds


def _advances_of(forms: Sequence[Hashable], total: int) -> dict[Hashable, int]:
    """Return by how much each form advances the offset, at least so far that none is repeated."""
    counts = Counter(forms)
    left = total - sum(_advances.get(form, 0) * count for form, count in counts.items())
    unknown = [form for form in counts if form not in _advances]
    if len(unknown) == 1 and left >= 0 and left % counts[unknown[0]] == 0:
        _advances[unknown[0]] = left // counts[unknown[0]]
    return {form: _advances.get(form) or _SMALLEST_STEP for form in counts}


def seeded(compute: Callable[..., Any], seed: int, args: Any, kwargs: Any) -> Any:
    """Call an operator on the CPU with numbers from `seed`; the user's generators do not change."""
    if any(type(value) is torch.Generator for value in (*args, *kwargs.values())):
        own = torch.Generator().manual_seed(seed)
        args = [own if isinstance(value, torch.Generator) else value for value in args]
        kwargs = {
            name: own if isinstance(value, torch.Generator) else value
            for name, value in kwargs.items()
        }
        return compute(*args, **kwargs)
    with _lock:  # operators without such an argument use the default generator
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            return compute(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)
