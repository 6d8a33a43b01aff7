"""The JSON file of a result, with NaN as null."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cka.errors import InputError
from cka.functional.calibration import Calibration
from cka.functional.confidence import Confidence

Result = TypeVar("Result")

_SCHEMA = "cka-result/1"
_MATRICES = ("matrix", "standard_error")
_FIGURES = {"calibration": Calibration, "confidence": Confidence}


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a result under a temporary name, and then rename the file.

    Raises:
        OSError: if the file cannot be written.
    """
    text = json.dumps({"schema": _SCHEMA, **_to_json(fields)}, allow_nan=False, indent=1)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path, build: Callable[..., Result]) -> Result:
    """Return the result in a file, which ``build`` makes of its fields.

    Raises:
        InputError: if the file is not a saved result.
        OSError: if the file cannot be read.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("schema") != _SCHEMA:
            raise KeyError("schema")
        dtype = {"float32": torch.float32, "float64": torch.float64}[found.pop("dtype")]
        for name in _MATRICES:
            found[name] = _tensor(found[name], dtype)
        for name, kind in _FIGURES.items():
            if found.get(name) is not None:
                given: dict[str, Any] = {
                    key: _tensor(value, torch.float64) if isinstance(value, list) else value
                    for key, value in found[name].items()
                }
                found[name] = kind(**given)
        return build(**found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is not a result in the format {_SCHEMA!r}; "
            "pass a file written by CKAResult.save"
        ) from error


def _to_json(given: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in given.items() if value is not None}
    for name in _MATRICES:
        fields[name] = _lists(fields[name])
    for name in _FIGURES.keys() & fields.keys():
        fields[name] = {
            key: _lists(value) if isinstance(value, Tensor) else value
            for key, value in vars(fields[name]).items()
        }
    return {"dtype": str(given["matrix"].dtype).removeprefix("torch."), **fields}


def _lists(values: Tensor) -> list[list[float | None]]:
    """Return the rows of a matrix, with None for NaN and infinity, which JSON does not have."""
    return [[one if math.isfinite(one) else None for one in row] for row in values.tolist()]


def _tensor(rows: list[list[float | None]], dtype: torch.dtype) -> Tensor:
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=dtype, device="cpu")
