"""The file of a result: JSON, without code, and with null for NaN."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cka.errors import InputError
from cka.functional.distributions import Calibration, Confidence
from cka.functional.sums import Sums, sums_to_vector, vector_to_sums, zero_sums

_SCHEMA = "cka-result/1"
_MATRICES = ("matrix", "standard_error")
_FIGURES = {"calibration": Calibration, "confidence": Confidence}


def write_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the fields of a result, under a temporary name that is then renamed.

    Args:
        path: the file, which is replaced if it exists.
        fields: the fields by name.

    Raises:
        OSError: if the file cannot be written.
    """
    text = json.dumps({"schema": _SCHEMA, **_to_json(fields)}, allow_nan=False, indent=1)
    # In the same folder: os.replace cannot move a file to another file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a result.

    Args:
        path: a file that :func:`write_fields` wrote.

    Raises:
        InputError: if the file is not a saved result.
        OSError: if the file cannot be read.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("schema") != _SCHEMA:
            raise KeyError("schema")
        dtype = {"float32": torch.float32, "float64": torch.float64}[fields.pop("dtype")]
        for name in _MATRICES:
            fields[name] = _tensor(fields[name], dtype)
        if fields.get("sums") is not None:
            fields["sums"] = _sums(fields["sums"], *fields["matrix"].shape)
        for name, kind in _FIGURES.items():
            if fields.get(name) is not None:
                figures: dict[str, Any] = {
                    key: _tensor(value, torch.float64) if isinstance(value, list) else value
                    for key, value in fields[name].items()
                }
                fields[name] = kind(**figures)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{path} is not a result in the format {_SCHEMA!r}; "
            "pass a file written by CKAResult.save"
        ) from error
    return fields


def _to_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a result as JSON's types, without those that are None."""
    known = {name: value for name, value in fields.items() if value is not None}
    for name in _MATRICES:
        known[name] = _lists(known[name])
    sums: Sums | None = known.get("sums")
    if sums is not None:
        values = _lists(sums_to_vector(sums)[None])[0]
        known["sums"] = {"values": values, "exponents": sums.exponents}
    for name in _FIGURES.keys() & known.keys():
        known[name] = {
            key: _lists(value) if isinstance(value, Tensor) else value
            for key, value in vars(known[name]).items()
        }
    return {"dtype": str(fields["matrix"].dtype).removeprefix("torch."), **known}


def _lists(values: Tensor) -> list[list[float | None]]:
    """Return the rows of a matrix, with None for NaN and infinity, which JSON does not have."""
    return [
        [number if math.isfinite(number) else None for number in row] for row in values.tolist()
    ]


def _sums(saved: Mapping[str, Any], rows: int, columns: int) -> Sums:
    """Return the sums that a file has."""
    exponents = saved["exponents"]
    if exponents is not None:
        exponents = (tuple(exponents[0]), tuple(exponents[1]))
    like = replace(
        zero_sums(rows, columns, torch.float64, torch.device("cpu")), exponents=exponents
    )
    return vector_to_sums(_tensor([saved["values"]], torch.float64)[0], like)


def _tensor(rows: list[list[float | None]], dtype: torch.dtype) -> Tensor:
    filled = [[math.nan if value is None else value for value in row] for row in rows]
    return torch.tensor(filled, dtype=dtype, device="cpu")
