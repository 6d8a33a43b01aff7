"""What a failing test says of the limits it broke."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.figures import Holding, RegionRecord
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.limits import Breach
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.reports.terminal import spark
from pytest_cka_memory.units import format_exact, format_size

_WIDTH = 100
_LONG_WORD = re.compile(rf"\S{{{_WIDTH // 2},}}")
_JOINT = re.compile(r"(?=[.[])")
_BREAK = "\v"
"""A space to textwrap, and in no name."""
_MOST_GROUPS = 4
_MOST_FRAMES = 4
_ADVICE = {
    "retained_bytes": "find what still refers to these: a list, an attribute, a hook, a cache",
    "growth_bytes_per_batch": "something is kept each batch: append loss.item(), not loss",
    "peak_increase_bytes": "free or detach tensors earlier, use torch.no_grad(), a smaller batch",
    "reserved_increase_bytes": "blocks of changing sizes fragment the reserve: keep batches alike",
}


def text(results: Sequence[Result], meter: Meter) -> str:
    """Name every broken limit of one test: the figures, who holds the bytes, what to do."""
    lines: list[str] = []
    for result in results:
        for number, breach in enumerate(result.breaches):
            already = {other.figure for other in result.breaches[:number]}
            lines += _broken(breach, result, meter)
            if breach.measured_bytes is not None and breach.figure not in already:
                lines += explained(breach, result.record)
    return "\n".join(lines)


def _broken(breach: Breach, result: Result, meter: Meter) -> Iterator[str]:
    region = f"region {result.record.label!r}" if result.record.label else "the whole test"
    yield from textwrap.wrap(f"{breach.limit} broken: {breach.message}", _WIDTH)
    yield f"  in {region}, on {meter.device} by {meter.name}"


def explained(breach: Breach, record: RegionRecord) -> Iterator[str]:
    """Tell who holds the bytes of a broken limit, and what to do."""
    holdings = {
        "retained_bytes": record.retained,
        "growth_bytes_per_batch": record.grown,
    }.get(breach.figure, record.at_peak)
    if breach.figure == "growth_bytes_per_batch" and record.timeline:
        # Not above the start: that is known in blocks, these are the bytes asked for.
        first = record.timeline[0].requested_bytes
        rises = [sample.requested_bytes - first for sample in record.timeline]
        span = f"{format_size(min(rises))} to {format_size(max(rises))}"
        yield f"  {spark(rises, 40)}  {span} above the first batch"
    if holdings is record.at_peak and holdings:
        yield "  alive at the peak:"
    told = None
    for holding in holdings[:_MOST_GROUPS]:
        yield from holding_lines(holding, traced=holdings is not record.at_peak)
        if holding.hint not in (None, told):
            told = holding.hint
            yield from _wrapped(f"what to do: {told}", "    ")
    rest = holdings[_MOST_GROUPS:]
    if rest:
        yield f"  and {len(rest)} smaller groups, {format_exact(sum(h.bytes for h in rest))}"
    hinted = any(holding.hint for holding in holdings[:_MOST_GROUPS])
    if not hinted and breach.figure in _ADVICE:
        yield f"  what to do: {_ADVICE[breach.figure]}"


def holding_lines(holding: Holding, *, traced: bool = True) -> Iterator[str]:
    """Tell of one group: what it is, where it was made, who holds it."""
    noun = "tensor" if holding.count == 1 else "tensors"
    count = f"{holding.count} {noun}, " if holding.count else ""
    kind = [f"{count}{format_exact(holding.bytes)}"]
    if holding.shape is not None:
        largest = "" if holding.count == 1 else "largest "
        kind.append(f"{holding.dtype} {largest}{holding.shape} by {holding.operator}")
    elif not traced:
        kind.append("alive before the region")
    if traced and holding.batches is not None:
        kind.append(f"born in {holding.batches} batches")
    yield from _wrapped(", ".join(kind), "  ")
    if holding.created_at:
        made = ", from ".join(holding.created_at[:_MOST_FRAMES])
        yield from _wrapped(f"made at {made}", "    ")
    if holding.held_by is not None:
        yield from _wrapped(f"held by {holding.held_by}", "    ")
    elif traced and holding.hint is None:
        yield "    held by nothing that Python can name"


def _wrapped(text: str, indent: str) -> list[str]:
    """Fold `text`; a word too long for a line before its dots and brackets, if it has any."""
    marked = _LONG_WORD.sub(lambda word: _JOINT.sub(_BREAK, word[0]), text)
    lines = textwrap.wrap(
        marked,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        replace_whitespace=False,
    )
    return [line.replace(_BREAK, "") for line in lines]
