"""What a comparison found: numbers on the CPU, and ways to look at them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cka import plots
from cka.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_SCHEMA = "cka-result/1"


class Match(NamedTuple):
    """A layer of the first model and the layer of the second that is most like it."""

    layer: str
    """Row of the first model."""
    match: str
    """Column of the second model with the highest CKA."""
    value: float
    """That CKA."""
    standard_error: float
    """Its standard error; NaN for fewer than two batches."""

    def __str__(self) -> str:
        error = "" if math.isnan(self.standard_error) else f" ± {self.standard_error:.4f}"
        return f"{self.layer} → {self.match}: {self.value:.4f}{error}"


@dataclass(frozen=True, eq=False)
class CKAResult:
    """CKA between the layers of two models."""

    matrix: Tensor
    """CKA, (L1, L2), on the CPU: float32, or float64 for models in float64. NaN where a layer is
    constant."""
    standard_error: Tensor
    """Jackknife standard error over batches, (L1, L2); NaN for fewer than two batches."""
    model1_layers: list[str]
    """Names of the L1 rows: the second call of ``relu`` is ``relu:1``."""
    model2_layers: list[str]
    """Names of the L2 columns."""
    model1_name: str
    """What to call the first model."""
    model2_name: str
    """What to call the second model."""
    samples: int
    """Samples used."""
    batches: int
    """Batches used."""
    estimator: str
    """``"unbiased"``, ``"biased"`` or ``"exact"``."""
    kernel: str
    """Name of the kernel."""
    self_comparison: bool
    """Whether both sides are one model on the same data."""

    def best_matches(self) -> list[Match]:
        """Each row's most similar column, rows of NaN left out.

        In a self-comparison a layer is not matched with itself.
        """
        values = self.matrix.double().nan_to_num(-math.inf)
        if self.self_comparison:
            for row, layer in enumerate(self.model1_layers):
                for column, other in enumerate(self.model2_layers):
                    if layer == other:
                        values[row, column] = -math.inf
        found = []
        for row, layer in enumerate(self.model1_layers):
            column = int(values[row].argmax())
            if values[row, column] > -math.inf:
                error = float(self.standard_error[row, column])
                value = float(self.matrix[row, column])
                found.append(Match(layer, self.model2_layers[column], value, error))
        return found

    def lines(self) -> list[str]:
        """A heading and each layer's best match, as text."""
        heading = (
            f"CKA of {self.model1_name} ({len(self.model1_layers)} layers) and "
            f"{self.model2_name} ({len(self.model2_layers)} layers): {self.samples} samples in "
            f"{self.batches} batches, {self.estimator}, {self.kernel} kernel"
        )
        return [heading, *(f"  {match}" for match in self.best_matches())]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"<CKAResult: {self.lines()[0]}>"

    def to_dataframe(self) -> pd.DataFrame:
        """The matrix with its layer names; the axes are named after the models.

        Raises:
            MissingExtraError: without pandas.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise plots.missing("pandas", "to_dataframe()") from error
        frame: pd.DataFrame = pd.DataFrame(
            self.matrix.numpy(),
            index=pd.Index(self.model1_layers, name=self.model1_name),
            columns=pd.Index(self.model2_layers, name=self.model2_name),
        )
        return frame

    def plot(self, *, ax: Axes | None = None, cmap: str = "magma") -> Axes:
        """Draw a heat map, first model upwards and second to the right; returns the axes.

        Raises:
            MissingExtraError: without matplotlib.
        """
        return plots.heat_map(
            self.matrix,
            self.model1_layers,
            self.model2_layers,
            row_model=self.model1_name,
            column_model=self.model2_name,
            ax=ax,
            cmap=cmap,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON, whole or not at all. NaN becomes null."""
        target = Path(path)
        text = json.dumps({"schema": _SCHEMA, **self._plain()}, allow_nan=False, indent=1)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CKAResult:
        """Read what :meth:`save` wrote. Nothing in the file is ever executed.

        Raises:
            InputError: if the file is no saved result.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.pop("schema") != _SCHEMA:
                raise KeyError("schema")
            dtype = {"float32": torch.float32, "float64": torch.float64}[found.pop("dtype")]
            for name in ("matrix", "standard_error"):
                found[name] = _tensor(found[name], dtype)
            return cls(**found)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{os.fspath(path)} is no result saved by CKAResult.save") from error

    def _plain(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in ("matrix", "standard_error"):
            plain[name] = [
                [None if math.isnan(value) else value for value in row]
                for row in plain[name].tolist()
            ]
        return {"dtype": str(self.matrix.dtype).removeprefix("torch."), **plain}


def _tensor(rows: list[list[float | None]], dtype: torch.dtype) -> Tensor:
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=dtype, device="cpu")
