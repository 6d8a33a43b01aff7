"""The three figures of the README beside other tools are those of the committed results."""

import json

from docs_pages import ROOT, prose

RESULTS = ROOT / "benchmarks" / "results"
README = prose(ROOT / "README.md")


def test_leaks_found_are_those_that_were_measured() -> None:
    """The README has the numbers of leaks found and repairs accused of each tool."""
    tools = json.loads((RESULTS / "leaks-torch-2.15.0.json").read_text("utf-8"))
    found, accused = (
        {tool: sum(row[key] for row in data["rows"]) for tool, data in tools.items()}
        for key in ("found", "accused")
    )
    own, low, high, objects = tools
    assert f"{found[own]} found, {accused[own]} repairs accused" in README
    assert (
        f"`limit_leaks` {found[low]} and {accused[low]}, or {found[high]} and {accused[high]} "
        f"with a higher limit; `limit_leaked_objects` {found[objects]} and {accused[objects]}"
    ) in README


def test_error_of_predicted_peaks_is_the_one_that_was_measured() -> None:
    """No predicted peak of fine-tuning is further from the published one than the README says."""
    rows = json.loads((RESULTS / "finetuning-torch-2.8.0.json").read_text("utf-8"))
    errors = [abs(row["bytes"] / 2**30 / row["published_gib"] - 1) * 100 for row in rows]
    assert len(rows) == 8
    assert f"within {max(errors):.2f} % of the published peaks of real cards" in README


def test_peaks_of_libraries_are_those_that_were_measured() -> None:
    """The README has the peak of each library beside the bare forward pass."""
    (file,) = RESULTS.glob("libraries-*.json")
    ratios = {
        row["library"]: row["peak_ratio"]
        for row in json.loads(file.read_text("utf-8"))
        if (row["network"], row["batch_size"]) == ("resnet18", 64)
    }
    peers = [f"{name} {ratios[f'{name} 1.1.3']:.2f}" for name in ("pytorch-cka", "cka-pytorch")]
    assert f"| {ratios['ours']:.2f} | {', '.join(peers)} |" in README
