"""How requests of a real card are put beside those of an emulated one."""

import gzip
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def compare_card(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the module that compares."""
    monkeypatch.syspath_prepend(str(FOLDER / "card"))
    import compare_card

    return compare_card


def asked(*events: int, peak: int = 0, retained: int = 0) -> dict[str, Any]:
    """Return what a function asked for."""
    return {"events": list(events), "peak": peak, "retained": retained, "peak_reserved": 2 * peak}


@pytest.mark.parametrize(
    ("card", "here", "outcome"),
    [
        (asked(512, -512), asked(512, -512), "equal"),
        (asked(512, 8, -8, -512), asked(512, 8, -512, -8), "another order"),
        (asked(500, -500), asked(512, -512), "equal blocks"),
        (asked(8, 8, peak=1024), asked(16, peak=1024), "equal peak"),
        (asked(8, peak=512), asked(1024, peak=1024), "different"),
        (asked(8, 1024, peak=1536), asked(1024, 8, peak=1024), "another order"),
        (asked(8), {"failed": "no"}, "fails here"),
        ({"failed": "no"}, {"failed": "no"}, "fails on both"),
    ],
)
def test_two_rows_have_one_outcome(compare_card, card, here, outcome):
    """The first that holds: equal requests, the same in another order, blocks, the peak."""
    assert compare_card.outcome(card, here) == outcome


def test_difference_is_what_only_one_side_asked_for(compare_card):
    """A request in the middle does not hide that the rest is equal."""
    card, here = asked(4, 512, -512, 8, peak=7), asked(4, 8, peak=5)
    assert compare_card.difference(card, here) == "peak 7 for 5; [512, -512] for []"


def write(folder: Path, kind: str, **rows: dict[str, Any]) -> None:
    """Write rows as the runner does."""
    lines = [json.dumps({"name": name, "rows": {"": [row]}}) for name, row in rows.items()]
    folder.mkdir(exist_ok=True)
    (folder / "about.json").write_text("{}", encoding="utf-8")
    with gzip.open(folder / f"{kind}.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([json.dumps({"begin": "a"}), *lines]))


def test_what_failed_on_the_card_or_is_missing_is_not_compared(compare_card, tmp_path):
    """A row is compared if the card has it; one that fails here is shown."""
    write(
        tmp_path / "card", "layers", a=asked(8, peak=512), b={"failed": "x"}, c=asked(), d=asked()
    )
    write(tmp_path / "here", "layers", a=asked(8, peak=512), b=asked(), c={"failed": "y"})
    found = compare_card.result(tmp_path / "card", tmp_path / "here")
    assert found["programs"] == []
    assert [(row["name"], row["outcome"]) for row in found["layers"]] == [
        ("a", "equal"),
        ("c", "fails here"),
    ]
    assert found["layers"][0]["here_peak_reserved"] == 1024
    assert found["layers"][1]["here_failed"] == "y"


@pytest.mark.parametrize(("card", "kind"), [("h100", "programs"), ("h100", "layers")])
def test_stored_comparison_is_of_the_stored_card(compare_card, card, kind):
    """The card's side of the result is what the card was asked for."""
    folder = FOLDER / "results" / f"card-{card}"
    result = json.loads((folder / "compared.json").read_text("utf-8"))
    peaks: dict[str, list[int]] = {}
    for name, rows in compare_card.read(folder, kind).items():
        for case, values in rows:
            peaks.setdefault(f"{name} {case}".rstrip(), []).append(values.get("peak"))
    assert len(result[kind]) > 70
    for row in result[kind]:
        assert row.get("card_peak") in peaks[row["name"]]
