"""Every page does what it says: its files are written, its commands run, its outputs compared."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from docs_pages import Block, blocks, name_of, pages
from docs_session import Session, Shown, is_checked_elsewhere

_SINCE = {"docs/how-to/graph-pools.md": (2, 12)}
"""Page -> the torch from which what it shows is so. Up to 2.11 the workspace of a captured product
stays in use in the pool of the deleted graph, and the page's test fails for a reason."""
_TORCH = tuple(map(int, version("torch").split(".")[:2]))


def _pages_to_run() -> Iterator[ParameterSet]:
    for page in pages():
        found = [block for block in blocks(page) if not is_checked_elsewhere(block)]
        emulates = any(
            "emulate:" in block.text or "emulated_cuda" in block.text
            for block in found
            if block.language in ("sh", "python")
        )
        if found:
            marks = [pytest.mark.emulates] if emulates else []
            since = _SINCE.get(name_of(page), _TORCH)
            reason = f"the page is about torch {'.'.join(map(str, since))} and newer"
            marks.append(pytest.mark.skipif(since > _TORCH, reason=reason))
            yield pytest.param(page, id=name_of(page), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*_pages_to_run()])
def test_page_runs_and_prints_what_it_shows(
    page: Path, session: Session, request: pytest.FixtureRequest
) -> None:
    """Every block of a page runs and prints what the page shows; an unknown note is an error."""
    shown = list(session.follow(blocks(page)))
    if request.config.getoption("--redraw", default=False):
        _redraw(page, shown)
        return
    for block, printed in shown:
        assert Shown(block, printed).same, (
            f"{block} shows\n{block.text}\nbut this is printed:\n{printed}\n"
            "If that is right, run: python tests/docs/redraw.py"
        )


def _redraw(page: Path, shown: list[Shown]) -> None:
    """Write what was printed in place of what the page shows, if more than the machine differs."""
    text = page.read_text("utf-8")
    for block, printed in reversed([each for each in shown if not each.same]):
        start, end = block.span
        text = text[:start] + printed + text[end:]
    page.write_text(text, "utf-8")


def test_every_language_is_one_that_the_tests_know() -> None:
    """A block in a language that the tests do not know would be neither run nor compared."""
    found: list[Block] = [block for page in pages() for block in blocks(page)]
    known = {"diff", "python", "sh", "text", "yaml", "toml", "ini", "json"}
    assert {block.language for block in found} <= known
