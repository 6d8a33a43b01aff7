"""Describe a path of references as plain text, one link for each object that users know.

Only a picture is drawn from it, so that it is made only if one was asked for.
"""

from collections.abc import Iterator, Sequence

from pytest_cka_memory.core.holdings import Link
from pytest_cka_memory.holders import loops
from pytest_cka_memory.holders.expressions import is_own_dict, shortened, text_of
from pytest_cka_memory.holders.tree import Reference
from pytest_cka_memory.holders.unreached import Unreached

_NAMES = ("_modules", "_parameters", "_buffers")
_OF_MODULES = {text for name in _NAMES for text in (f"['{name}']", f".{name}")}
"""References to the dicts of a module, which users do not write. An object refers to them itself,
not its dict, where Python keeps attributes in the object (from 3.13 on)."""
_MOST_LINKS = 12
"""Links of a path; of a longer one, the first and the last."""
_MOST_CHARACTERS = 120
_OF_CPP = "C or C++ code"


def of_path(path: Sequence[Reference]) -> tuple[Link, ...]:
    """Return the links from a root to the holder at the end of `path`."""
    first = path[0]
    assert first.root is not None, "a path starts at a root"
    start = Link(str(first.text), loops.label(first.value))
    return _bounded([Link("", first.root.label), start, *_following(path)])


def of_unreached(found: Unreached) -> tuple[Link, ...]:
    """Return the links from C or C++ code to a holder, or around a loop and from there to it."""
    first = found.path[0]
    if not found.loop:
        start = Link("references", loops.label(first.value))
        return _bounded([Link("", _OF_CPP), start, *_following(found.path)])
    # A loop begins and ends with the same object; the path begins at any object of it.
    ring = list(found.loop[1:])
    at = next(number for number, step in enumerate(ring) if step.value is first.value)
    turned = [Reference(first.value, None), *ring[at + 1 :], *ring[: at + 1]]
    around = list(_following(turned))
    back = Link(around[-1].reference, f"the same {around[-1].object}")
    return _bounded(
        [Link("", loops.label(first.value)), *around[:-1], back, *_following(found.path)]
    )


def _following(path: Sequence[Reference]) -> Iterator[Link]:
    """Yield a link for each object after the first, except dicts that users do not write."""
    before = ""
    for number, step in enumerate(path[1:], 1):
        text = step.text or text_of(step.parent, step.value)
        is_last = number == len(path) - 1
        if not is_last and (text in _OF_MODULES or is_own_dict(step.value, step.parent)):
            before += text
            continue
        reference = shortened(before + text).removeprefix(" -> ")
        yield Link(reference, loops.label(step.value))
        before = ""


def _bounded(path: Sequence[Link]) -> tuple[Link, ...]:
    """Return a path without its middle if it is long, and with texts of a bounded length."""
    left = len(path) - _MOST_LINKS
    if left > 0:
        half = _MOST_LINKS // 2
        path = [*path[:half], Link("", f"… {left} more …"), *path[half + left :]]
    return tuple(Link(_cut(link.reference), _cut(link.object)) for link in path)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
