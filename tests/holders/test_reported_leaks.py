"""Leaks that users have reported in public: the plugin finds each, and its advice repairs it."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.usefixtures("forked_children")
def test_every_reported_leak_is_found_and_repaired_by_an_edit_that_the_message_advises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of the twelve breaks its limit with advice, and passes after one of the edits."""
    pytest.importorskip("torchmetrics")
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import reported_leaks

    rows = reported_leaks.rows_of("cpu")
    assert len(rows) == 12
    assert [row["report"] for row in rows if not (row["found"] and row["held_by"])] == []
    assert [row["report"] for row in rows if not row["advice"]] == []
    assert [row["report"] for row in rows if "passes" not in row["followed"].values()] == []
