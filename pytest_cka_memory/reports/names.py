"""Names of regions that fit into a table: a heading per file, and short names that differ."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pytest_cka_memory.core.verdicts import Result
from pytest_cka_memory.reports.escapes import one_line

_WORD_START = re.compile(r"(?<=[\[\]\-_:/. ,])")


class RowName(NamedTuple):
    """The name of a region in two parts, of which tables show the first once for several rows."""

    heading: str
    """File and class of the test: ``tests/test_net.py::TestNet``."""
    row: str
    """Test, label and rank: ``test_step[64] train``."""


def row_name(result: Result) -> RowName:
    """Return the name of a region, on one line, split before the name of the test's function."""
    file, colons, test = result.nodeid.partition("::")
    if not colons:
        return RowName("", one_line(result.name))
    classes, colons, _ = test.partition("[")[0].rpartition("::")
    heading = f"{file}::{classes}" if colons else file
    return RowName(one_line(heading), one_line(result.name[len(heading) + 2 :]))


def fitted(names: Sequence[str], room: int) -> list[str]:
    """Shorten names to `room` characters, at least 8; names that differ stay different."""
    room = max(8, room)
    shown = {name: name for name in names if len(name) <= room}
    taken = set(shown.values())
    for name, text in _cut([name for name in dict.fromkeys(names) if len(name) > room], room):
        number, unique = 1, text
        while unique in taken:
            number += 1
            unique = f"{text[: room - len(str(number)) - 1]}~{number}"
        shown[name] = unique
        taken.add(unique)
    return [shown[name] for name in names]


def _cut(names: Iterable[str], room: int, start: int = 0) -> list[tuple[str, str]]:
    """Return each name with its text from `start` on, without a part of its middle.

    If several texts are equal, the part in which their names begin to differ is shown instead.
    """
    equal = defaultdict(list)
    for name in names:
        equal[_shortened(name if start == 0 else f"…{name[start:]}", room)].append(name)
    found = []
    for text, group in equal.items():
        if len(group) == 1:
            found.append((group[0], text))
        else:
            differs = _first_difference(group)
            found += _cut(group, room, _word_start(group[0], differs, room // 3 - 2))
    return found


def _shortened(name: str, room: int) -> str:
    """Leave out a part in the middle, if possible before the parameters of a test."""
    if len(name) <= room:
        return name
    bracket = name.find("[")
    end = max(room // 2, min(len(name) - bracket, room * 2 // 3)) if bracket > 0 else room // 2
    return f"{name[: room - end - 1]}…{name[-end:]}"


def _first_difference(names: Sequence[str]) -> int:
    """Return the position of the first character that is not the same in all names."""
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(last)))


def _word_start(name: str, position: int, most: int) -> int:
    """Return where the word at `position` begins; at most `most` characters before it."""
    starts = [match.start() for match in _WORD_START.finditer(name, 0, position)]
    return max(1, position - most, *starts)
