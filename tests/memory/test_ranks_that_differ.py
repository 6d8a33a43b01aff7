"""The table says which figures of a region differ between ranks, and on which they are highest."""

from dataclasses import replace

from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports import terminal
from pytest_cka_memory.reports.terminal import differences
from pytest_cka_memory.units import MB


def _on_ranks(record, *records):
    """Return a region's results on ranks 0, 1, ..."""
    return [
        replace(judge("t.py::test_step", record(label="train", **figures), []), worker=f"rank {n}")
        for n, figures in enumerate(records)
    ]


def test_lowest_and_highest_figures_are_named_with_their_ranks(record):
    """Of three ranks, the second has the highest peak and the first keeps a tensor."""
    peaks = 2 * MB, 5 * MB, 3 * MB
    ranks = _on_ranks(record, *({"peak_bytes": peak} for peak in peaks))
    assert list(differences(ranks)) == [
        "the ranks differ in test_step train: "
        "peak increase from 2.00 MB (rank 0) to 5.00 MB (rank 1)"
    ]
    ranks[0] = replace(ranks[0], record=replace(ranks[0].record, retained_bytes=400))
    (text,) = differences(ranks)
    assert text.endswith("; retained from 0 (rank 1) to 400 B (rank 0)")
    shown = " ".join(line.text for line in terminal.table(ranks, 300)[0])
    assert text in " ".join(shown.split())


def test_nothing_is_said_of_equal_ranks_or_without_ranks(record):
    """A region that is the same on all ranks needs no sentence, nor do tests without ranks."""
    assert list(differences(_on_ranks(record, {"peak_bytes": MB}, {"peak_bytes": MB}))) == []
    alone = [judge("t.py::test_step", record(peak_bytes=size), []) for size in (1, 2)]
    assert list(differences(alone)) == []
