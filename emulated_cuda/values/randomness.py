"""Random numbers: those of the CPU's algorithm, from the state of the CUDA generator.

The seed of each operator is made from the seed and the offset of the CUDA generator, which torch's
own code advances. So ``torch.cuda.manual_seed`` and ``torch.cuda.set_rng_state`` repeat numbers.
The first operator after ``torch.manual_seed`` gives the same numbers as on the CPU.

A replay of a CUDA graph begins at the offset that the generator has then, and each operator in it
draws as many numbers as outside of a graph: so both give the same numbers. How far an operator
advances the offset cannot be read during a capture. It is known from a run outside, as of a
warm-up, or is what the replay advances the generator by and the others do not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
        return tuple(map(_form, value))
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
