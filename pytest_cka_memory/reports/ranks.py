"""How the figures of a region differ between the ranks that have measured it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.figure import Figure
from pytest_cka_memory.core.figures import COMPARED
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports.names import row_name
from pytest_cka_memory.units import format_with_unit


def differences(results: Sequence[Result]) -> Iterator[str]:
    """Yield a sentence for each region that is not the same on all ranks; none without ranks."""
    of_region = defaultdict(list)
    for result in results:
        if result.rank:
            of_region[result.nodeid, result.record.label].append(result)
    for measured in of_region.values():
        parts = [part for figure in COMPARED.values() if (part := _spread(figure, measured))]
        if parts:
            name = row_name(measured[0]).row.removesuffix(f" {measured[0].rank}")
            yield f"the ranks differ in {name}: {'; '.join(parts)}"


def _spread(figure: Figure, measured: Sequence[Result]) -> str:
    """Return lowest and highest value with their ranks; empty if all are equal or unknown."""
    values = [(getattr(result.record, figure.name), result.rank) for result in measured]
    known = [(value, rank) for value, rank in values if value is not None]
    if len({value for value, _ in known}) < 2:
        return ""
    low, high = (choose(known, key=lambda entry: entry[0]) for choose in (min, max))
    return (
        f"{figure.noun} from {format_with_unit(low[0])} ({low[1]}) "
        f"to {format_with_unit(high[0])} ({high[1]})"
    )
