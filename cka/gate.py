"""A gate for converted models: find the first layer whose representation differs.

It is a function and not a pytest marker, because this package and the plugin do not import each
other: ``assert same_representations(...)`` works in any test, and the plugin's markers on the same
test limit its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from cka.capture import Layers, format_labels
from cka.comparison import CKA
from cka.errors import CKAWarning, LayerError, SettingError


@dataclass(frozen=True, eq=False)
class Agreement:
    """How a converted model agrees with its reference, layer by layer; true if all layers do."""

    values: Mapping[str, float]
    """CKA of each layer with the same layer of the reference, in order of execution. It is 0 if the
    output is the same for every sample, or NaN, in one of the models only."""
    at_least: float
    """What was asked for."""
    only_in_one: list[str]
    """Layers that one of the two models has."""
    constant: list[str]
    """Layers that are not judged: their output is the same for every sample in both models, so that
    their CKA is NaN."""

    @property
    def different(self) -> list[str]:
        """The layers whose CKA is below ``at_least``, in order of execution."""
        return [layer for layer, value in self.values.items() if value < self.at_least]

    @property
    def first_difference(self) -> str | None:
        """The first of them, or None."""
        return next(iter(self.different), None)

    def __bool__(self) -> bool:
        return bool(self.values) and not self.different

    def __str__(self) -> str:
        first = self.first_difference
        notes = ""
        if self.only_in_one:
            notes += f"; only one model has {format_labels(self.only_in_one, 4)}"
        if self.constant:
            constant = format_labels(self.constant, 4)
            notes += f"; not judged because their output is constant: {constant}"
        if first is None:
            if not self.values:
                return f"no layer was judged{notes}"
            lowest = min(self.values, key=lambda layer: self.values[layer])
            return (
                f"{len(self.values)} layers have a CKA of at least {self.at_least:g} with the "
                f"reference (lowest: {lowest}, {self.values[lowest]:.6f}){notes}"
            )
        names = list(self.values)
        at = names.index(first)
        before = names[at - 1] if at else None
        agrees = (
            f"{before}, the layer before, has {self.values[before]:.6f}; look at what {first} "
            "computes"
            if before is not None
            else "no compared layer runs before it; look at this layer and at its inputs"
        )
        return (
            f"{first} is the first of {len(self.different)} layers (of {len(names)}) that differ "
            f"from the reference. Its CKA is {self.values[first]:.6f} instead of at least "
            f"{self.at_least:g}; {agrees}{notes}"
        )

    def __repr__(self) -> str:
        return f"<Agreement: {self}>"


def same_representations(
    model: nn.Module,
    reference: nn.Module,
    data: Iterable[Any],
    *,
    at_least: float = 0.999,
    layers: Layers = None,
    rename: Callable[[str], str] | None = None,
    **settings: Any,
) -> Agreement:
    """Compare each layer of a converted model with the same layer of its reference.

    >>> import copy, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> converted = copy.deepcopy(model)
    >>> data = [torch.randn(64, 8)]
    >>> assert same_representations(converted, model, data)
    >>> _ = converted[2].weight.data.normal_()
    >>> same_representations(converted, model, data).first_difference
    '2'

    CKA does not change if a layer's features are rotated or multiplied by a number, so the gate is
    for errors that mix, drop or distort features: a transposed or misnamed weight, a wrong
    activation, too few bits. It needs no equal values, and so no tolerance for each layer.

    Args:
        model: the converted, quantised, compiled or ported model.
        reference: the original.
        data: batches for both, as for :meth:`cka.CKA.compare`. A few hundred samples suffice.
        at_least: the lowest CKA that counts as the same, between 0 and 1.
        layers: the layers of the model to compare; None for all.
        rename: a function from the name of a layer of ``model`` to that of the reference, if the
            names differ.
        **settings: further settings of :class:`cka.CKA`, such as ``device``, ``pooling`` or
            ``cast_inputs``.

    Returns:
        An :class:`Agreement`, which is true if all layers agree; pytest shows it if
        ``assert same_representations(...)`` fails.

    Raises:
        LayerError: if the models have no layer in common.
        SettingError: if ``at_least`` is not between 0 and 1.
    """
    if not 0 < at_least <= 1:
        raise SettingError(
            f"at_least must be above 0 and at most 1, got {at_least!r}; write e.g. 0.999"
        )
    with warnings.catch_warnings():
        # The agreement that is returned states what the warnings would say.
        warnings.simplefilter("ignore", CKAWarning)
        with CKA(model, reference, layers, **{"model2_layers": None, **settings}) as cka:
            result = cka.compare(data, progress=False)
    renamed = {label: rename(label) if rename else label for label in result.model1_layers}
    columns = set(result.model2_layers)
    common = {label: other for label, other in renamed.items() if other in columns}
    if not common:
        raise LayerError(
            f"the models have no layer name in common: {format_labels(result.model1_layers, 4)} "
            f"and {format_labels(result.model2_layers, 4)}; pass rename= to say which names "
            "belong together"
        )
    nan = result.matrix.isnan()
    rows, columns_of = result.model1_layers, result.model2_layers
    dead_rows = {label for label, all_nan in zip(rows, nan.all(1).tolist(), strict=True) if all_nan}
    dead = {
        label for label, all_nan in zip(columns_of, nan.all(0).tolist(), strict=True) if all_nan
    }
    values, constant = {}, []
    for label, other in common.items():
        value = result[label, other]
        if value == value:
            values[label] = value
        elif label in dead_rows and other in dead:
            constant.append(label)
        else:
            values[label] = 0.0  # constant or NaN in one model only
    missing = [label for label in renamed if label not in common]
    missing += [label for label in result.model2_layers if label not in set(common.values())]
    return Agreement(values, at_least, missing, constant)
