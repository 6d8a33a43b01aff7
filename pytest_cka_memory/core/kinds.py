"""Kinds of memory that was live at a peak: their names, their sums, and a line about them."""

from collections import Counter
from collections.abc import Iterable, Mapping

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.holdings import Holding
from pytest_cka_memory.units import format_with_unit

PARAMETERS = "parameters"
"""Parameters and buffers of modules."""
GRADIENTS = "gradients"
"""``.grad`` of leaf tensors, and what a backward pass has returned."""
OPTIMISER = "optimiser"
"""The state of optimizers."""
INPUTS = "inputs"
"""What a loader yields, and what code outside modules creates or copies to the device."""
ACTIVATIONS = "activations"
"""What a graph of autograd has kept for its backward pass."""
TEMPORARIES = "temporaries"
"""Results that were freed again, and that no graph had kept."""
WORKSPACES = "workspaces"
"""Memory that libraries keep until their workspaces are dropped."""
IN_POOLS = "graph pools"
"""Memory in private pools of CUDA graphs and ``MemPool`` that has no other kind."""
OTHER = "other"
"""Everything else, such as results that the code has kept."""
KINDS = (
    PARAMETERS,
    GRADIENTS,
    OPTIMISER,
    INPUTS,
    ACTIVATIONS,
    TEMPORARIES,
    WORKSPACES,
    IN_POOLS,
    OTHER,
)

_OF_TRAINING = (ACTIVATIONS, GRADIENTS, OPTIMISER)
"""If a region has one of them, the line says also that it has none of another."""


def sums(holdings: Iterable[Holding], *, before_region: bool) -> Mapping[str, int]:
    """Return the bytes of each kind, largest first; empty if kinds are not known.

    Args:
        holdings: what was live at a peak.
        before_region: whether what was allocated before the region counts.
    """
    bytes_of_kinds: Counter[str] = Counter()
    for holding in holdings:
        if holding.kind is not None and (before_region or not holding.before_region):
            bytes_of_kinds[holding.kind] += holding.bytes
    order = {kind: number for number, kind in enumerate(KINDS)}  # a file may have other kinds
    largest_first = sorted(
        bytes_of_kinds.items(), key=lambda item: (-item[1], order.get(item[0], len(order)))
    )
    return dict(largest_first)


def line(record: RegionRecord, figure: str) -> str:
    """Return the kinds of what was live at a region's peak as one line; empty if not known.

    Args:
        record: the region.
        figure: the figure that is explained. Only for ``peak_bytes`` does the memory count that was
            live before the region.
    """
    is_level = figure == "peak_bytes"
    found = sums(record.at_peak, before_region=is_level)
    total = sum(found.values())
    if not total:
        return ""
    missing = [kind for kind in _OF_TRAINING if kind not in found]
    parts = [f"{kind} {_share(size, total)}" for kind, size in found.items()]
    parts += [f"{kind} 0" for kind in missing if len(missing) < len(_OF_TRAINING)]
    if is_level:
        return f"at the peak, with what was live before the region: {', '.join(parts)}"
    freed_bytes = total - record.peak_increase_bytes
    less = f"; {format_with_unit(freed_bytes)} from before it had been freed" if freed_bytes else ""
    return f"at the peak, allocated in the region: {', '.join(parts)}{less}"


def _share(size: int, total: int) -> str:
    percent = round(100 * size / total)
    return f"{percent} %" if percent else "< 1 %"
