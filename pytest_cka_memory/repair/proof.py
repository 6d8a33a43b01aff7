"""Whether numbers stay the same: those of two runs, and a loss that is computed in parts.

Two runs have a loss and every gradient to compare. If a loss is a mean over its batch, the mean
over equal parts is the same. What a change is expected to do to the numbers is in
:attr:`.trials.Change.numbers`, and :func:`.trials.keeps_numbers` decides by it.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from pytest_cka_memory.meters.torch_keepers import saved_by
from pytest_cka_memory.repair import Site, calling_site, calls_directly
from pytest_cka_memory.repair.trials import calls_followed, replaced, tensors_in

MOST_ROUNDING = 1e-5
"""By how much of the largest gradient of a parameter others may differ if they are rounded
differently."""


@contextmanager
def values_kept(path: str) -> Iterator[None]:
    """Write what the block computes to a file: the first loss, the gradients of its backward pass,
    and what models returned before it. Later steps would amplify how they are rounded.
    """
    kept: dict[str, Any] = {"losses": [], "gradients": {}, "results": [], "parts": []}
    handles: list[Any] = []
    known: set[int] = set()
    parameters: dict[str, weakref.ref[torch.Tensor]] = {}
    passes = [0]

    def begins(module: torch.nn.Module, outer: list[torch.nn.Module]) -> None:
        if outer or passes[0]:  # in the backward pass checkpointed modules are called again
            return
        for name, parameter in module.named_parameters():
            if id(parameter) not in known and parameter.requires_grad and parameter.is_leaf:
                known.add(id(parameter))
                parameters[f"{len(known)}.{name}"] = weakref.ref(parameter)
                handles.append(_keep(kept["gradients"], f"{len(known)}.{name}", parameter))

    def ends(module: Any, outer: list[torch.nn.Module], given: Any, result: Any) -> None:
        is_result = isinstance(result, torch.Tensor) and not result.requires_grad
        if is_result and not outer and not passes[0]:
            kept["results"].append(result.detach().cpu())

    def recorded(backward: Callable[..., Any]) -> Callable[..., Any]:
        def record(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            passes[0] += 1
            if passes[0] == 1 and isinstance(tensors, torch.Tensor):
                kept["losses"].append(tensors.detach().cpu())
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                _remove(handles)
                if passes[0] == 1:
                    _keep_sharded(kept["gradients"], kept["parts"], parameters)

        return record

    with ExitStack() as stack:
        stack.enter_context(calls_followed(begins, ends))
        backward = torch.autograd.backward
        stack.enter_context(replaced(torch.autograd, "backward", recorded(backward)))
        try:
            yield
        finally:
            _remove(handles)
    torch.save(kept, path)


def _keep(gradients: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> Any:
    def keep(gradient: torch.Tensor) -> None:
        gradients[name] = gradient.detach().cpu().clone()

    # Before it is accumulated: an optimizer may step then, and free it.
    return parameter.register_hook(keep)


def _keep_sharded(
    gradients: dict[str, torch.Tensor],
    parts: list[str],
    parameters: dict[str, "weakref.ref[torch.Tensor]"],
) -> None:
    """Keep the gradients of parameters that ``fully_shard`` has spread: it calls no hook of them,
    and sets what this process has of each gradient when it is reduced.
    """
    for name, reference in parameters.items():
        parameter: Any = reference()
        if name in gradients or not hasattr(parameter, "to_local") or parameter.grad is None:
            continue
        gradients[name] = parameter.grad.to_local().detach().cpu().clone()
        parts.append(name)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


class Difference(NamedTuple):
    """How two runs differ."""

    is_equal: bool
    """Whether everything is equal, bit for bit."""
    largest: float
    """The largest difference, as a share of the largest element of its tensor."""
    where: str
    compared: int
    """How many tensors were compared."""


def difference(before: str, *after: str) -> Difference:
    """Compare two files of :func:`values_kept`.

    Args:
        before: the first file.
        after: the second one, or those of all ranks, each of which has parts of the gradients.

    Raises:
        ValueError: if they have different gradients or losses.
    """
    old, new, *others = (torch.load(path, weights_only=True) for path in (before, *after))
    for name in new["parts"] if others else ():
        parts = [each["gradients"][name] for each in (new, *others)]
        new["gradients"][name] = torch.cat(parts)  # fully_shard spreads the first dimension
    pairs = [(f"loss {n}", *pair) for n, pair in enumerate(_zipped(old, new, "losses"), 1)]
    pairs += [(f"result {n}", *pair) for n, pair in enumerate(_zipped(old, new, "results"), 1)]
    if old["gradients"].keys() != new["gradients"].keys():
        missing = sorted(old["gradients"].keys() ^ new["gradients"].keys())
        raise ValueError(
            f"only one of the two runs has a gradient of {missing[0].partition('.')[2]}"
        )
    for name, tensor in old["gradients"].items():
        computed = new["gradients"][name]
        pairs.append((f"gradient of {name.partition('.')[2]}", tensor, computed))
    largest, where, is_equal = 0.0, "", True
    for name, expected, computed in pairs:
        is_equal &= torch.equal(expected, computed)
        relative = _relative(expected.double(), computed.double())
        if relative > largest:
            largest, where = relative, name
    return Difference(is_equal, largest, where, len(pairs))


def _zipped(old: Any, new: Any, key: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if len(old[key]) != len(new[key]):
        raise ValueError(
            f"the change altered the number of {key}: {len(old[key])} before, {len(new[key])} after"
        )
    yield from zip(old[key], new[key], strict=True)


def _relative(expected: torch.Tensor, computed: torch.Tensor) -> float:
    if expected.shape != computed.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = max(float(expected.abs().max()), 1e-30)
    return float((expected - computed).abs().max()) / scale


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

NOT_A_MEAN = "changes the results unless the loss is a mean over the batch"
WEIGHTED = (
    "changes the results unless the class weights of the targets have the same sum in every part "
    "of the batch"
)
IGNORED = (
    "changes the results if ignore_index leaves out more targets in one part of the batch than in "
    "another"
)


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


@dataclass
class Loss:
    """A call of ``cross_entropy``."""

    site: Site | None
    rows: int
    classes: int
    usable: bool
    """Whether it is a mean of one row after the other, with options that are known."""


def loss_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Loss:
    """Return a call of ``cross_entropy``, as a function mode of :mod:`.observation` sees it."""
    site = calling_site() if calls_directly(5) else None
    rows, classes = args[0].shape
    rest = {name for name, value in kwargs.items() if value is not None}
    rest -= {"ignore_index", "label_smoothing", "reduction"}
    is_mean = len(args) == 2 and kwargs.get("reduction", "mean") == "mean"
    return Loss(site, rows, classes, is_mean and not rest and args[1].dim() == 1)


def is_training(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``batch_norm`` computes statistics of the batch."""
    return bool(kwargs.get("training", args[5] if len(args) > 5 else False))


_REDUCING = {
    *("mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "prod"),
    *("amax", "amin", "max", "min", "median", "logsumexp", "softmax", "log_softmax", "normalize"),
    *("cumsum", "cumprod", "sort", "argsort", "topk", "flip", "roll"),
}
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "einsum", "cdist", "linear"}


class Mixing:
    """Which sizes have dimensions of which functions compute one element from several others.

    If the rows of a batch are such a dimension, the batch cannot be split: in a contrastive loss,
    for example, each row is compared with all others.
    """

    def __init__(self) -> None:
        self._reduced: set[int] = set()
        self._multiplied: set[int] = set()
        self._scalars: dict[int, tuple[torch.Tensor, int]] = {}
        """Identity of a tensor -> the tensor, and the first size of what it was reduced from."""

    def concerns(self, batch: int) -> bool:
        """Whether rows of a batch of this size, or of parts of each row, were mixed."""
        return batch in self._multiplied or any(size % batch == 0 for size in self._reduced)

    def note(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note a call of a function of torch."""
        tensors = [each for each in tensors_in(args, 2) if not is_lazy(each)]
        if self._scalars:
            known = [self._scalars[id(each)][1] for each in tensors if id(each) in self._scalars]
            firsts = {each.shape[0] for each in tensors if each.dim()}
            self._reduced |= firsts & set(known)
        if not tensors or not tensors[0].dim():
            return
        if name in _REDUCING:
            self._note_reduction(tensors[0], args, kwargs, result)
        elif name in _PRODUCTS and isinstance(result, torch.Tensor):
            sizes = [Counter(each.shape) for each in tensors]
            made = Counter(result.shape)
            self._multiplied |= {size for each in sizes for size in each if size not in made}
            pairs = {size for size in made if made[size] > 1}
            self._multiplied |= {n for n in pairs if all(each[n] < 2 for each in sizes)}

    def _note_reduction(
        self, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        axes = kwargs.get("dim", kwargs.get("axis", next(iter(_dimensions(args[1:])), None)))
        axes = [axes] if isinstance(axes, int) else axes
        if axes is None:
            if isinstance(result, torch.Tensor) and not result.dim():
                self._scalars[id(result)] = result, tensor.shape[0]
        elif 0 in [number % tensor.dim() for number in axes] and len(axes) < tensor.dim():
            self._reduced.add(tensor.shape[0])

    def end(self) -> None:
        """Free the tensors that it keeps."""
        self._scalars.clear()


def _dimensions(args: Any) -> Iterator[Any]:
    for each in args:
        is_list = isinstance(each, (list, tuple)) and all(isinstance(n, int) for n in each)
        if (isinstance(each, int) and not isinstance(each, bool)) or (is_list and each):
            yield each
