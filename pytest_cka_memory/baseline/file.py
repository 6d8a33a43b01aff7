"""The committed file of baselines: a JSON array, one line a region, so that merges are sane.

Every line but the first and the last is a comma and a region, so to add, change or drop a region
touches its own line alone. Any layout of the same JSON is read, for formatters may have been at it.
"""

import json
import re
import reprlib
from bisect import bisect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pytest_cka_memory.core.tolerance import COMPARED
from pytest_cka_memory.errors import BaselineError

SCHEMA = "pytest-cka-memory-baseline/1"
_HEADER = {"schema": SCHEMA}
_CONFLICT = re.compile(r"^(?:<{7}|={7}|>{7}|\|{7}).*$", re.MULTILINE)
_NEWER = re.compile(r"pytest-cka-memory-baseline/\d{1,9}")
_SPACE = re.compile(r"[ \t\r\n]*")
_MOST_BYTES = 2**63

Figures = Mapping[str, int | None]
"""A key of ``core.tolerance.COMPARED`` -> bytes; None if it was not determined."""


class Fingerprint(NamedTuple):
    """What figures depend on besides the code: others say nothing here."""

    device: str
    """The model of an accelerator; ``cpu`` for every CPU, whose figures do not depend on it."""
    meter: str
    torch: str | None = None
    """Major and minor version: ``2.15``; None where no torch was imported."""
    cuda: str | None = None
    """Likewise; None on other devices."""

    def __str__(self) -> str:
        torch = f"torch {self.torch}" if self.torch else "no torch"
        cuda = [f"CUDA {self.cuda}"] if self.cuda else []
        return ", ".join([self.device, self.meter, torch, *cuda])


class Key(NamedTuple):
    """Which region of which test, measured on what."""

    nodeid: str
    label: str
    """Empty for a whole test; a second region of one label is ``label #2``."""
    fingerprint: Fingerprint


Entries = dict[Key, Figures]


def text(entries: Mapping[Key, Figures]) -> str:
    """Return the file that holds `entries`, sorted."""
    regions = [
        {"nodeid": key.nodeid, "label": key.label, **key.fingerprint._asdict(), **entries[key]}
        for key in sorted(entries, key=lambda key: [part or "" for part in _flat(key)])
    ]
    lines = [f", {json.dumps(region, ensure_ascii=False)}" for region in regions]
    return "\n".join([f"[ {json.dumps(_HEADER)}", *lines, "]", ""])


def _flat(key: Key) -> tuple[str | None, ...]:
    return (key.nodeid, key.label, *key.fingerprint)


def read(path: Path) -> Entries:
    """Read a baseline file.

    Raises:
        BaselineError: naming the file, the line and what is wrong with it.
    """
    try:
        if path.exists() and not path.is_file():
            raise BaselineError(f"cannot use {path}: it is no file")
        return parse(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise BaselineError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise BaselineError(f"cannot use {path}, line {line}: it is not UTF-8") from None
    except BaselineError as error:
        if str(path) in str(error):
            raise
        raise BaselineError(f"cannot use {path}, {error}") from None


def parse(content: str) -> Entries:
    """Read the text of a baseline file.

    Raises:
        BaselineError: ``line 3: ...``, what is wrong there and what to do.
    """
    _refuse_conflict(content)
    elements = _elements(content)
    line, header = next(elements)
    _check_header(line, header)
    entries: Entries = {}
    lines: dict[Key, int] = {}
    for line, element in elements:
        key, figures = _region(line, element)
        if key in entries:
            raise _wrong(line, f"the region of line {lines[key]} again; keep one of the two lines")
        entries[key], lines[key] = figures, line
    return entries


def _wrong(line: int, problem: str) -> BaselineError:
    return BaselineError(f"line {line}: {problem}")


def _shown(value: object) -> str:
    """Its repr, short however large and deep it is."""
    text = reprlib.repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse_conflict(content: str) -> None:
    conflict = _CONFLICT.search(content)
    if conflict is not None:
        raise _wrong(
            content.count("\n", 0, conflict.start()) + 1,
            f"an unresolved merge ({conflict[0][:40].strip()!r}); keep either side's lines, then "
            "measure anew with --cka-memory-update-baseline",
        )


def _elements(content: str) -> Iterator[tuple[int, Any]]:
    """Each element of the array, after the line it begins on; at least one."""
    newlines = [match.start() for match in re.finditer("\n", content)]

    def line_at(position: int) -> int:
        return bisect(newlines, position - 1) + 1

    position = _after_space(content, 0)
    if content[position : position + 1] != "[":
        raise _wrong(line_at(position), _FOREIGN)
    mark = "["
    while mark != "]":
        start = _after_space(content, position + 1)
        try:
            element, position = _DECODER.raw_decode(content, start)
        except json.JSONDecodeError as error:
            raise _wrong(line_at(error.pos), f"no JSON: {error.msg}") from None
        except BaselineError as error:
            raise _wrong(line_at(start), str(error)) from None
        except RecursionError:
            raise _wrong(line_at(start), "nested too deeply for a region") from None
        yield line_at(start), element
        position = _after_space(content, position)
        mark = content[position : position + 1]
        if mark == "":
            raise _wrong(line_at(position), "cut off: the last ']' is missing")
        if mark not in ",]":
            raise _wrong(line_at(position), "no JSON: neither ',' nor the last ']' follows")
    end = _after_space(content, position + 1)
    if end != len(content):
        raise _wrong(line_at(end), "something follows the last ']'")


def _after_space(content: str, position: int) -> int:
    space = _SPACE.match(content, position)
    return position if space is None else space.end()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BaselineError(f"{_shown(twice)} is given twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > len(str(_MOST_BYTES)):
        raise BaselineError(f"{digits[:12]}... is no number of bytes")
    return int(digits)


def _no_number(name: str) -> None:
    raise BaselineError(f"{name} is no number of bytes")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_integer, parse_constant=_no_number
)
_FOREIGN = f"no baseline file, which begins with [ {json.dumps(_HEADER)}"


def _check_header(line: int, header: object) -> None:
    if header == _HEADER:
        return
    schema = header.get("schema") if isinstance(header, dict) else None
    if isinstance(schema, str) and _NEWER.fullmatch(schema):
        raise _wrong(line, f"schema {schema}, and this plugin reads {SCHEMA}: upgrade the plugin")
    raise _wrong(line, _FOREIGN)


def _region(line: int, element: object) -> tuple[Key, Figures]:
    if not isinstance(element, dict):
        raise _wrong(line, f"{_shown(element)} is no region")
    names = ("nodeid", "label", *Fingerprint._fields, *COMPARED)
    for name in (*(name for name in names if name not in element), *element):
        if name not in element or name not in names:
            problem = "is missing" if name in names else "is no key of a region"
            raise _wrong(line, f"{_shown(name)} {problem}")
    for name in ("nodeid", "label", *Fingerprint._fields):
        if not isinstance(element[name], str | None if name in ("torch", "cuda") else str):
            raise _wrong(line, f"{name!r} is {_shown(element[name])}, no text")
    for name in COMPARED:
        _check_bytes(line, name, element[name])
    fingerprint = Fingerprint(*(element[name] for name in Fingerprint._fields))
    return Key(element["nodeid"], element["label"], fingerprint), {
        name: element[name] for name in COMPARED
    }


_OPTIONAL = ("growth_bytes_per_batch", "reserved_increase_bytes")


def _check_bytes(line: int, name: str, size: object) -> None:
    if size is None and name in _OPTIONAL:
        return
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= _MOST_BYTES:
        raise _wrong(line, f"{name!r} is {_shown(size)}; write a whole number of bytes, 0 or more")
