"""Constants in the code that ``torch.jit`` has optimized: only C++ references them.

After a few calls TorchScript computes what does not depend on the inputs, and keeps it in a graph
of its own beside the one that users read as ``function.graph``.
"""

from collections.abc import Iterator
from typing import Any

CONSTANT = ".get_debug_state() -> a constant of an optimized graph"
"""How to write the reference to such a constant: the graph has no short expression."""


def constants(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors in the graphs that `function`, or a module's method, has been run with.

    Args:
        function: a function or module of TorchScript.
    """
    try:
        plans = list(function.get_debug_state().execution_plans.values())
    except (RuntimeError, AttributeError):  # it has no graph, or was never called
        return
    for plan in plans:
        for node in _nodes(plan.graph):
            if node.kind() == "prim::Constant" and _kind_of(node, "value") == "t":
                yield CONSTANT, node.t("value")


def _nodes(block: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or block, and of the graphs and blocks in them."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
        if _kind_of(node, "Subgraph") == "g":
            yield from _nodes(node.g("Subgraph"))


def _kind_of(node: Any, attribute: str) -> str:
    return str(node.kindOf(attribute)) if node.hasAttribute(attribute) else ""
