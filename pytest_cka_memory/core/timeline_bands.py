"""Divide the places of a timeline into bands: few enough to tell apart in a picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pytest_cka_memory.units import counted

_MOST_BANDS = 12
_MOST_MODULES = 10
_UNKNOWN = "outside Python code, such as in a backward pass"


class Place(NamedTuple):
    """Where blocks were allocated, in words; what is unknown is empty."""

    line: str
    """``net.py:11 in Block.forward``."""
    code: str
    """The expression there."""
    module: str
    """The path of the module that was running."""
    inside: str
    """What allocated them if no tensor owned them."""
    callers: tuple[str, ...]
    """The lines that called `line`."""


Weight = tuple[int, int]
"""Of a place: bytes at the peak, and the most at any moment."""


@dataclass(frozen=True)
class Bands:
    """The bands of one view, from the bottom of the picture to its top."""

    labels: Sequence[str]
    of_place: Mapping[int, int]
    """Number of a place -> number of its band."""


def bands_by_line(places: Sequence[Place], weights: Mapping[int, Weight]) -> Bands:
    """Return one band for each of the lines that allocated most, and one for all others."""
    return _largest({place: _line(places[place]) for place in weights}, weights, "line")


def bands_by_module(places: Sequence[Place], weights: Mapping[int, Weight]) -> Bands:
    """Return bands of modules, where large ones are divided; what no module has is in lines."""
    sizes: dict[str, Weight] = {}
    for place, weight in weights.items():
        path = places[place].module
        if path:
            sizes[path] = _added(sizes.get(path, (0, 0)), weight)
    names = _modules(sizes)
    labels = {
        place: names.get(places[place].module) or f"no module: {_line(places[place])}"
        for place in weights
    }
    return _largest(labels, weights, "place")


def _line(place: Place) -> str:
    line = place.line or (place.inside or _UNKNOWN)
    code = f": {place.code}" if place.code else ""
    inside = f" ({place.inside})" if place.inside and place.line else ""
    return f"{line}{code}{inside}"


def _added(one: Weight, other: Weight) -> Weight:
    return one[0] + other[0], one[1] + other[1]


def _largest(labels: Mapping[int, str], weights: Mapping[int, Weight], noun: str) -> Bands:
    sizes: dict[str, Weight] = {}
    for place, label in labels.items():
        sizes[label] = _added(sizes.get(label, (0, 0)), weights[place])
    by_need = sorted(sizes, key=lambda label: (-2 * sizes[label][0] - sizes[label][1], label))
    chosen = by_need if len(by_need) <= _MOST_BANDS else by_need[: _MOST_BANDS - 1]
    shown = sorted(chosen, key=lambda label: (-sizes[label][0], -sizes[label][1], label))
    numbers = {label: number for number, label in enumerate(shown)}
    rest = len(sizes) - len(shown)
    other = [f"{counted(rest, f'other {noun}')}"] if rest else []
    of_place = {place: numbers.get(label, len(shown)) for place, label in labels.items()}
    return Bands([*shown, *other], of_place)


def _modules(sizes: Mapping[str, Weight]) -> dict[str, str]:
    """Return path -> the module whose band it is in.

    It begins with the outermost modules and divides the largest into its children, again and
    again, as long as the bands are few enough.
    """
    bands = _children("", sizes)
    whole: set[str] = set()
    while True:
        open_bands = [name for name in bands if name not in whole and set(bands[name]) != {name}]
        if not open_bands:
            break
        largest = max(open_bands, key=lambda name: _weight(bands[name], sizes))
        parts = _children(largest, bands[largest])
        if len(bands) - 1 + len(parts) > _MOST_MODULES:
            whole.add(largest)
        else:
            del bands[largest]
            bands.update(parts)
            whole.update({largest} & set(parts))
    return {path: name for name, paths in bands.items() for path in paths}


def _weight(paths: Iterable[str], sizes: Mapping[str, Weight]) -> Weight:
    total = (0, 0)
    for path in paths:
        total = _added(total, sizes[path])
    return total


def _children(name: str, paths: Iterable[str]) -> dict[str, list[str]]:
    """Return child of a module -> the paths in it; a path that is the module's own stays one."""
    start = f"{name}." if name else ""
    found: dict[str, list[str]] = {}
    for path in paths:
        part = path.removeprefix(start).partition(".")[0] if path != name else ""
        found.setdefault(f"{start}{part}" if part else name, []).append(path)
    return found
