"""A committed law is compared to the byte; what rose is named by term and line."""

from collections.abc import Callable
from typing import Any

import pytest

from pytest_cka_memory.laws import Block, RecordedSample, Site
from pytest_cka_memory.laws.fitting import fit
from pytest_cka_memory.laws.law import Law
from pytest_cka_memory.laws.polynomials import Point
from pytest_cka_memory.limits.laws import difference, to_dict

HEAD, MASK = Site(("net.py:7 in head",), "x.float()"), Site(("net.py:9 in mask",), "zeros(s, s)")


def committed(*lines: tuple[Site, Callable[[int], int]]) -> dict[str, Any]:
    """Return the law of code that allocates at some lines and frees all at the end."""

    def measure(point: Point) -> RecordedSample:
        blocks = [
            Block(size(*point), number, len(lines) + number, site)
            for number, (site, size) in enumerate(lines, 1)
        ]
        return RecordedSample(point, blocks)

    return to_dict(Law(fit(measure, {"s": (8, 16, 32)})))


PLAIN = committed((HEAD, lambda s: 64 * s))


def test_equal_and_lower_laws_are_kept() -> None:
    """A law that fell is no failure, as with every other figure."""
    assert difference(PLAIN, PLAIN) == ""
    assert difference(PLAIN, committed((HEAD, lambda s: 63 * s))) == ""


def test_a_byte_more_per_item_is_named_with_its_line() -> None:
    """Both laws, the coefficient, and the line; the number of the line may have changed."""
    moved = HEAD._replace(frames=("net.py:12 in head",))
    assert difference(PLAIN, committed((moved, lambda s: 64 * s))) == ""
    message = difference(PLAIN, committed((moved, lambda s: 65 * s)))
    assert message == (
        "the law of the peak has changed. It was 64 · s; now it is 65 · s. What rose: "
        "s: 64 -> 65 bytes (net.py:12 in head: x.float(): +1)"
    )


def test_a_new_power_is_named_with_its_line() -> None:
    """The mask of s² is new."""
    message = difference(PLAIN, committed((HEAD, lambda s: 64 * s), (MASK, lambda s: 4 * s * s)))
    assert "It was 64 · s; now it is 64 · s + 4 · s²." in message
    assert message.endswith("s²: 0 -> 4 bytes (net.py:9 in mask: zeros(s, s): +4)")


def test_constant_that_replaces_a_power_is_no_rise_if_it_is_always_below() -> None:
    """512 bytes are never above 64 · s from 8 on; 513 are, at 8."""
    assert difference(PLAIN, committed((HEAD, lambda s: 512))) == ""
    assert "513" in difference(PLAIN, committed((HEAD, lambda s: 513)))


def test_laws_that_are_not_exact_are_compared_by_their_degrees() -> None:
    """Noise is no rise, another power is."""
    rough = {**PLAIN, "exact": False}
    higher = committed((HEAD, lambda s: 66 * s))
    assert difference(rough, {**higher, "exact": False}) == ""
    square = committed((HEAD, lambda s: 4 * s * s))
    assert "4 · s²" in difference(rough, {**square, "exact": False})


@pytest.mark.parametrize("change", [{"of": "retained"}, {"sizes": ["n"]}])
def test_another_law_of_that_name_is_refused(change: dict[str, object]) -> None:
    """A test that measures something else needs a new baseline."""
    assert "update the baseline" in difference(PLAIN, {**PLAIN, **change})
