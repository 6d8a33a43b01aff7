"""Whether a loss is a mean over its batch, so that the mean over equal parts is the same."""

from typing import Any

import torch

from pytest_cka_memory.meters.torch_keepers import saved_by

_SAME_VALUE = ("ToCopy", "Clone", "Alias", "View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze")
_BY_CONSTANT = ("Mul", "Div", "Neg")
_SUMS = ("Add", "Sub")
_MEANS = ("Mean",)
_WITH_REDUCTION = (
    *("NllLoss", "NllLoss2D", "MseLoss", "HuberLoss", "SmoothL1Loss", "BinaryCrossEntropy"),
    *("BinaryCrossEntropyWithLogits", "SoftMarginLoss", "MultiMarginLoss"),
)
_MEAN = 1
"""What autograd saves for ``reduction="mean"``."""
_DEFAULT_IGNORED = -100
_MOST_PARTS = 4

NOT_A_MEAN = "changes the numbers, unless the loss is a mean over the batch"
WEIGHTED = "changes the numbers, unless all parts have the same weights of classes"
IGNORED = "changes the numbers, if parts differ in how many targets ignore_index leaves out"


def numbers_of_parts(loss: torch.Tensor, *, has_values: bool) -> str:
    """Return how the mean over equal parts of a batch differs from a loss; empty if it does not.

    Args:
        loss: what the model returned, with its graph.
        has_values: whether targets can be read. If not, targets may be ignored if another
            ``ignore_index`` than the default is given.
    """
    node = loss.grad_fn
    return NOT_A_MEAN if node is None else _of_node(node, has_values)


def _of_node(node: Any, has_values: bool) -> str:
    name = node.name().rpartition("::")[2].partition("Backward")[0]
    inner = [each for each, _ in node.next_functions if each is not None]
    if name in _MEANS:
        return ""
    if name in _WITH_REDUCTION:
        if saved_by(node, "reduction") != _MEAN:
            return NOT_A_MEAN
        if saved_by(node, "weight") is not None:
            return WEIGHTED
        return IGNORED if name.startswith("NllLoss") and _ignores(node, has_values) else ""
    is_sum = name in _SUMS and inner
    if is_sum or (name in (*_SAME_VALUE, *_BY_CONSTANT) and len(inner) == 1):
        return next(filter(None, (_of_node(each, has_values) for each in inner)), "")
    return NOT_A_MEAN


def _ignores(node: Any, has_values: bool) -> bool:
    ignored = saved_by(node, "ignore_index", _DEFAULT_IGNORED)
    ignored -= 2**64 if ignored >= 2**63 else 0  # read as unsigned
    if not has_values:
        return bool(ignored != _DEFAULT_IGNORED)
    kept = (saved_by(node, "target") != ignored).flatten()
    parts = kept.reshape(_MOST_PARTS, -1) if kept.numel() % _MOST_PARTS == 0 else kept[None]
    counts = parts.sum(1)
    return bool((counts != counts[0]).any()) if len(parts) > 1 else not bool(kept.all())
