"""Random numbers: those of the CPU's algorithm, from the state of the CUDA generator.

The seed of each operator is made from the seed and the offset of the CUDA generator, which torch's
own code advances. So ``torch.cuda.manual_seed`` and ``torch.cuda.set_rng_state`` repeat numbers.
The first operator after ``torch.manual_seed`` gives the same numbers as on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_SMALLEST_STEP = 4  # offsets are multiples of it
_lock = threading.RLock()


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


def advance(generator: torch.Generator, seed_before: int) -> None:
    """Advance a generator that the operator has not advanced, so that no numbers come twice."""
    if seed_of(generator) == seed_before:
        generator.set_offset(generator.get_offset() + _SMALLEST_STEP)


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
