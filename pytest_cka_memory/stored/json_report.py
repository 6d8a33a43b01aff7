"""The JSON report: written, its schema, and read back with every value checked.

A file may come from anywhere.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from pytest_cka_memory.core.decoder import (
    RepeatedKeyError,
    ShapeError,
    decode,
    is_other_version,
    line_at,
    unique_keys,
)
from pytest_cka_memory.core.figure_rows import Figure
from pytest_cka_memory.core.figures import DERIVED, MEASURED, RegionRecord
from pytest_cka_memory.core.record_parts import Refusal
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.reserve import ReservePart
from pytest_cka_memory.core.retention import Holding, ProcessSample, ProcessUse, Sample
from pytest_cka_memory.core.verdicts import Breach, Result, Unjudged
from pytest_cka_memory.errors import ReportError

SCHEMA = "pytest-cka-memory/1"

_on_a_line = partial(json.dumps, ensure_ascii=False, allow_nan=False)
_in_lines = partial(_on_a_line, indent=1)  # much slower, so not used for regions


def render(report: Report) -> str:
    """Return the report as JSON text, with one line per region."""
    head = _in_lines({"schema": SCHEMA, "session": dict(report.session)})
    regions = ",\n".join(f"  {_on_a_line(_region(result))}" for result in report.results)
    rest = {
        "problems": list(report.problems),
        "missing": list(report.missing),
        "unmeasured": dict(report.unmeasured),
    }
    return (
        head.removesuffix("\n}")
        + f',\n "regions": [\n{regions}\n ],\n'
        + _in_lines(rest).removeprefix("{\n")
        + "\n"
    )


def _region(result: Result) -> dict[str, Any]:
    region = result.to_dict()
    del region["memory_timeline"], region["reserve_segments"]  # of pictures, which the page draws
    del region["moments"]  # judged already
    if region["law"] is None:
        del region["law"]
    return region


_TEMPLATE = Path(__file__).with_name("schema.json")
"""What the schema has besides types: descriptions, lowest values, and the words of enumerations."""
_PARTS: Mapping[str, Any] = {
    "region": RegionRecord,
    "process_sample": ProcessSample,
    "process": ProcessUse,
    "sample": Sample,
    "holding": Holding,
    "breach": Breach,
    "unjudged": Unjudged,
    "reserve_part": ReservePart,
    "refusal": Refusal,
}
_NAMES = {kind: name for name, kind in _PARTS.items()}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}
_NOT_ALWAYS = frozenset({"extra", "law", "paths"})
"""Keys that are absent if there is nothing to say."""
_FIGURES_AFTER = {"completed": MEASURED, "garbage": DERIVED}


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of reports, draft 2020-12."""
    schema: dict[str, Any] = json.loads(_TEMPLATE.read_text(encoding="utf-8"))
    for name, kind in _PARTS.items():
        part = schema["$defs"][name]
        hints = get_type_hints(Result) | get_type_hints(kind)
        properties: dict[str, Any] = {}
        for key, described in part["properties"].items():
            known = described if "enum" in described else {**_type_of(hints[key]), **described}
            properties[key] = known
            figures = _FIGURES_AFTER.get(key, ()) if name == "region" else ()
            properties.update({figure.name: _described(figure) for figure in figures})
        required = [key for key in properties if key not in _NOT_ALWAYS]
        schema["$defs"][name] = {
            "type": "object",
            "description": part["description"],
            "required": required,
            "properties": properties,
        }
    return schema


def _type_of(hint: Any) -> dict[str, Any]:
    """Return the part of the schema that says of which type a field of a dataclass is."""
    if type(None) in get_args(hint):
        of = _type_of(get_args(hint)[0])
        if "type" not in of:
            return {"anyOf": [of, {"type": "null"}]}
        return {**of, "type": [of["type"], "null"]}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": _type_of(get_args(hint)[0])}
    if hint in _NAMES:
        return {"$ref": f"#/$defs/{_NAMES[hint]}"}
    return {"type": _TYPES.get(hint, "object")}


def _described(figure: Figure) -> dict[str, Any]:
    kind = "number" if figure.name.endswith("_per_batch") else "integer"
    described: dict[str, Any] = {
        "type": [kind, "null"] if figure.optional else kind,
        "description": figure.description,
    }
    return {**described, "minimum": 0} if figure.never_negative else described


MOST_BYTES = 2**29
"""Far more than any report has, and little enough to hold in memory several times."""

_AGAIN = "write a report with pytest --cka-memory-json=PATH"
_OBJECT: Any = dict
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
        ReportError: if it cannot be read or is not a report. Its message names the file and the
            place in it.
    """
    try:
        return _report(_parse(_bytes_of(path)))
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
        raise ReportError(f"the file is larger than {MOST_BYTES // 2**20} MB; refusing to read it")
    if not content.strip():
        raise ReportError(f"the file is empty; {_AGAIN}")
    return content


def _parse(content: bytes) -> Any:
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte order mark
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        problem = f"line {line_at(content, error.start)}: not UTF-8 ({error.reason})"
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RepeatedKeyError as error:
        problem = str(error)
    except RecursionError:
        problem = "nested more deeply than any report"
    except ValueError:
        problem = "a number with thousands of digits, which no figure has"
    raise ReportError(f"{problem}; {_AGAIN}")


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
    if not is_other_version(schema, SCHEMA):
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
