"""Read a JSON report back. It may come from anywhere, so nothing in it is taken on trust."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_cka_memory.core.verdicts import Report, Result
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.reports.json.decoder import ShapeError, shaped
from pytest_cka_memory.reports.json.writer import SCHEMA

MOST_BYTES = 2**29
"""Beyond any report, and of what a machine can hold in memory several times over."""

_OBJECT: Any = dict
_SCHEMAS = re.compile(r"pytest-cka-memory/([1-9]\d{0,3})")
_SESSION: Mapping[str, Any] = {
    **dict.fromkeys(("device", "device_name", "meter", "torch", "cuda"), str | None),
    **dict.fromkeys(("python", "plugin", "started"), str | None),
    "workers": int | None,
    "notes": tuple[str, ...] | None,
}
"""What a session says -> its type; anything else that is there stays as it is."""


def read(path: Path) -> Report:
    """Read the report at `path`.

    Raises:
        ReportError: for a file that is none, naming it, where it is wrong, and what would do.
    """
    try:
        return _report(_parse(_decoded(_bytes_of(path))))
    except ReportError as error:
        raise ReportError(f"cannot read {path}: {error}") from None


def _bytes_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ReportError(error.strerror or str(error)) from None
    except ValueError as error:  # a path with a null byte
        raise ReportError(str(error)) from None
    if len(content) > MOST_BYTES:
        raise ReportError(f"it is larger than {MOST_BYTES // 2**20} MB, which no report is")
    if not content.strip():
        raise ReportError("it is empty; write one with pytest --cka-memory-json=PATH")
    return content


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # some editors put the mark of a byte order in front
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ReportError(f"line {line}: it is not UTF-8 ({error.reason})") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ReportError(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ReportError("it is nested more deeply than any report") from None
    except ValueError:
        raise ReportError("it has a number of thousands of digits, which no figure is") from None


def _no_constant(name: str) -> NoReturn:
    raise ReportError(f"{name} is no JSON; a figure is a finite number or null")


def _report(data: Any) -> Report:
    if not isinstance(data, dict) or "schema" not in data:
        raise ReportError(f"it is no report: it does not begin with a schema, {SCHEMA!r}")
    _check_schema(data["schema"])
    try:
        regions = _field(data, "regions", tuple[_OBJECT, ...])
        return Report(
            _session(_field(data, "session", _OBJECT)),
            tuple(_result(region, f"regions[{number}]") for number, region in enumerate(regions)),
            _field(data, "missing", tuple[str, ...], ()),
            _field(data, "unmeasured", dict[str, int], {}),
            problems=_field(data, "problems", tuple[str, ...], ()),
        )
    except ShapeError as error:
        raise ReportError(str(error)) from None


def _check_schema(schema: object) -> None:
    if schema == SCHEMA:
        return
    known = isinstance(schema, str) and _SCHEMAS.fullmatch(schema)
    if not known:
        raise ReportError(f"schema {str(schema)[:80]!r} is not that of a report, {SCHEMA!r}")
    raise ReportError(
        f"its schema is {schema!r} and this plugin reads {SCHEMA!r}: "
        "a newer pytest-cka-memory wrote it, update this one"
    )


def _field(data: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    if name not in data and default is not None:
        return default
    return shaped(kind, data.get(name), name)


def _session(data: dict[str, Any]) -> dict[str, Any]:
    read = {
        name: shaped(kind, data.get(name), f"session.{name}") for name, kind in _SESSION.items()
    }
    return {**data, **read, "notes": list(read["notes"] or ())}


def _result(region: dict[str, Any], where: str) -> Result:
    result: Result = shaped(Result, {**region, "record": region}, where, flat=("record",))
    return result
