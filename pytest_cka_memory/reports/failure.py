"""What a failing test says of the limits it broke."""

import textwrap
from collections.abc import Sequence

from pytest_cka_memory.meters import Meter
from pytest_cka_memory.results import Result

_WIDTH = 100
_ADVICE = {
    "retained": "find what still refers to these tensors: a list, an attribute, a hook, a cache",
    "grew": "something is kept each batch: append loss.item(), not loss; clear what you collect",
    "peak": "free or detach tensors earlier, use torch.no_grad(), or a smaller batch",
    "reserve": "blocks of changing sizes fragment the reserve; a steady batch size avoids it",
}


def text(results: Sequence[Result], meter: Meter) -> str:
    """Name every broken limit of one test: what was measured, what is allowed, what to do."""
    lines = []
    for result in results:
        region = f"region {result.record.label!r}" if result.record.label else "the whole test"
        for breach in result.breaches:
            lines += textwrap.wrap(f"{breach.limit} broken: {breach.message}", _WIDTH)
            lines.append(f"  in {region}, on {meter.device} by {meter.name}")
            advice = _ADVICE.get(breach.message.split()[0])
            lines += [f"  what to do: {advice}"] if advice is not None else []
    return "\n".join(lines)
