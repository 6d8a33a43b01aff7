"""Run a function again and again, to find what would lower its peak."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from emulated_cuda.cards import CARDS, CONTEXT_BYTES
from pytest_cka_memory.errors import RegionError, SizeError
from pytest_cka_memory.measure.region_stack import RegionStack
from pytest_cka_memory.meters.accelerator.emulated import computes_values, emulated_cards
from pytest_cka_memory.meters.torch_versions import is_out_of_memory
from pytest_cka_memory.repair.report import RepairReport
from pytest_cka_memory.repair.search import Search
from pytest_cka_memory.repair.trials import Figures
from pytest_cka_memory.units import megabytes


def repairs(
    stack: RegionStack,
    step: Callable[[], Any],
    to: object = None,
    seconds: float = 20.0,
    show: Callable[[str], object] | None = None,
) -> RepairReport:
    """Do what :meth:`MemoryProbe.repairs` says, for the device of `stack`."""
    device = stack.meter.torch_device
    search = Search(
        partial(_run, stack, step),
        partial(is_out_of_memory, device=device),
        progress=show or _to_stderr,
        budget_bytes=None if to is None else budget_of(to),
        seconds=seconds,
        has_values=computes_values(),
        cards=emulated_cards(),
    )
    tried = search.search()
    if tried.as_it_is.figures is None and tried.as_it_is.error != "out of memory":
        raise RegionError(
            f"repairs(): the step does not run as it is ({tried.as_it_is.error}); pass a function "
            "that can be called several times"
        )
    name = getattr(step, "__qualname__", type(step).__name__)
    return RepairReport(tried, stack.meter.device, name)


def budget_of(to: object) -> int:
    """Return the bytes of a budget: a card's usable memory, MB, or a text such as ``24GB``.

    Raises:
        SizeError: if it is neither.
    """
    if isinstance(to, str) and to in CARDS:
        return CARDS[to].total_bytes - CONTEXT_BYTES
    try:
        return megabytes(to)
    except SizeError as error:
        raise SizeError(f"{error}, or the name of a card: {', '.join(CARDS)}") from None


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(stack: RegionStack, step: Callable[[], Any]) -> Figures:
    region = stack.open(thorough=True)
    try:
        step()
    finally:
        with stack.closing(region, thorough=True) as closed:
            end = closed.end
    return Figures(end.peak_bytes, end.peak_reserved_bytes)
