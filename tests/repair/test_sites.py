"""Where an expression is: also under Python 3.10, which knows only lines."""

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from pytest_cka_memory.repair import Site, _by_order, site_of


def both() -> tuple[Site | None, Site | None]:
    """Return the site of the call of this function by columns, and by the order of calls."""
    frame = sys._getframe(1)
    columns = site_of(frame.f_code, frame.f_lasti)
    return columns, _by_order(frame.f_code, frame.f_lasti)


def same(value: Any, *_: Any, **__: Any) -> Any:
    """Return the first argument."""
    return value


def alone() -> Any:
    return both()


def second_of_its_line() -> Any:
    return (same(2), both())[1]


def as_argument() -> Any:
    return same(same(both(), 3), key=same(4))


def over_several_lines() -> Any:
    return same(
        both(),
        same(5),
    )


def method_and_unpacking() -> Any:
    return [same(each) for each in (both(), "".join(*[["a"]])) if each or each]


CASES = (alone, second_of_its_line, as_argument, over_several_lines, method_and_unpacking)


@pytest.mark.skipif(not hasattr(CodeType, "co_positions"), reason="compares with columns")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_order_of_calls_gives_the_same_expression_as_columns(case: Callable[[], Any]) -> None:
    """The call is found by its place among those of its line, with its exact end."""
    found = case()
    columns, order = found[0] if isinstance(found, list) else found
    assert columns is not None
    assert order == columns
