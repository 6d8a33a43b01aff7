"""Read a JSON report back. It may come from anywhere, so every value is checked."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pytest_cka_memory.core.decoder import RepeatedKeyError, ShapeError, decode, unique_keys
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.errors import ReportError
from pytest_cka_memory.reports.json.writer import SCHEMA

MOST_BYTES = 2**29
"""Far more than any report has, and little enough to hold in memory several times."""

_AGAIN = "write a report with pytest --cka-memory-json=PATH"
_OBJECT: Any = dict
_SCHEMAS = re.compile(r"pytest-cka-memory/([1-9]\d{0,3})")
_SESSION: Mapping[str, Any] = {
    **dict.fromkeys(("device", "device_name", "meter", "torch", "cuda"), str | None),
    **dict.fromkeys(("python", "plugin", "started"), str | None),
    "workers": int | None,
    "notes": tuple[str, ...] | None,
    "conditions": dict[str, str] | None,
}
"""Key of the session -> its type; other keys are kept unchecked."""


def read(path: Path) -> Report:
    """Read the report at `path`.

    Raises:
        ReportError: if it cannot be read or is not a report; names the file and the place in it.
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
        raise ReportError(f"larger than {MOST_BYTES // 2**20} MB; refusing to read it")
    if not content.strip():
        raise ReportError(f"the file is empty; {_AGAIN}")
    return content


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ReportError(f"line {line}: not UTF-8 ({error.reason}); {_AGAIN}") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ReportError(f"{place}: {error.msg}; {_AGAIN}") from None
    except RepeatedKeyError as error:
        raise ReportError(f"{error}; {_AGAIN}") from None
    except RecursionError:
        raise ReportError(f"nested more deeply than any report; {_AGAIN}") from None
    except ValueError:
        problem = "a number with thousands of digits, which no figure has"
        raise ReportError(f"{problem}; {_AGAIN}") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ReportError(f"{name} is not valid JSON; a figure is a finite number or null")


def _report(data: Any) -> Report:
    if not isinstance(data, dict) or "schema" not in data:
        raise ReportError(
            f"not a report: the key 'schema' is missing; a report has {SCHEMA!r} there"
        )
    _check_schema(data["schema"])
    try:
        regions = _field(data, "regions", tuple[_OBJECT, ...])
        return Report(
            _session(_field(data, "session", _OBJECT)),
            tuple(
                Result.from_dict(region, f"regions[{number}]")
                for number, region in enumerate(regions)
            ),
            _field(data, "missing", tuple[str, ...], ()),
            _field(data, "unmeasured", dict[str, int], {}),
            problems=_field(data, "problems", tuple[str, ...], ()),
        )
    except ShapeError as error:
        raise ReportError(f"{error}; {_AGAIN}") from None


def _check_schema(schema: object) -> None:
    if schema == SCHEMA:
        return
    known = isinstance(schema, str) and _SCHEMAS.fullmatch(schema)
    if not known:
        given = str(schema)[:80]
        raise ReportError(f"not a report: its schema is {given!r}, not {SCHEMA!r}; {_AGAIN}")
    raise ReportError(
        f"its schema is {schema!r}, but this plugin reads {SCHEMA!r}: a newer pytest-cka-memory "
        "wrote it; upgrade the plugin"
    )


def _field(data: dict[str, Any], name: str, kind: Any, default: Any = None) -> Any:
    if name not in data and default is not None:
        return default
    return decode(kind, data.get(name), name)


def _session(data: dict[str, Any]) -> dict[str, Any]:
    read = {
        name: decode(kind, data.get(name), f"session.{name}") for name, kind in _SESSION.items()
    }
    lists = {"notes": list(read["notes"] or ()), "conditions": read["conditions"] or {}}
    return {**data, **read, **lists}
