"""Modules of the plugin are imported without pytest's rewriting of assertions."""

import sys
from importlib.machinery import PathFinder

from _pytest.assertion.rewrite import AssertionRewritingHook

from pytest_cka_memory.plugin.pytest_private import plain_imports


def pytest_finders() -> list[object]:
    return [finder for finder in sys.meta_path if isinstance(finder, AssertionRewritingHook)]


def test_only_the_finder_of_pytest_is_left_out_and_comes_back_in_front() -> None:
    before = list(sys.meta_path)
    assert pytest_finders(), "this session rewrites assertions"
    with plain_imports():
        assert not pytest_finders()
        assert PathFinder in sys.meta_path
    assert sys.meta_path == before


def test_a_finder_that_is_added_in_the_block_stays() -> None:
    class Finder(PathFinder):
        pass

    added = Finder()
    try:
        with plain_imports():
            sys.meta_path.append(added)  # as libraries do when they are imported
        assert added in sys.meta_path
    finally:
        sys.meta_path.remove(added)


def test_the_finder_comes_back_after_an_exception() -> None:
    before = list(sys.meta_path)
    try:
        with plain_imports():
            raise ImportError
    except ImportError:
        pass
    assert sys.meta_path == before
