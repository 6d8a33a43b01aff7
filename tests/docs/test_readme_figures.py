"""The figures of the README beside other tools and cards are those of the committed results."""

import json
import re

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
        f"`limit_leaks` {found[low]} and {accused[low]} above 1 KB, {found[high]} and "
        f"{accused[high]} above 100 KB; `limit_leaked_objects` {found[objects]} and "
        f"{accused[objects]}"
    ) in README


def test_figures_of_real_cards_are_those_that_were_predicted(monkeypatch) -> None:
    """The README has how many published figures were predicted, and how far off they are."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "real_cards"))
    from real_cards_tables import compared

    rows = compared()
    sources = {row.case.source.split("/blob/")[0].split("/tree/")[0] for row in rows}
    blind = sum(row.blind for row in rows)
    assert f"{len(rows)} figures from {len(sources)} sources, {blind} of them before" in README

    def shares(most):  # rounded down, as on the page
        kinds = [[abs(row.error) for row in rows if row.is_reserve is it] for it in (False, True)]
        return [100 * sum(error <= most for error in errors) // len(errors) for errors in kinds]

    (near, near_reserved), (close, close_reserved) = shares(0.0005), shares(0.01)
    worst = max(abs(row.error) for row in rows)
    assert (
        f"within 0.05 %: {near} % of what is allocated, {near_reserved} % of what is reserved; "
        f"within 1 %: {close} % and {close_reserved} %; the worst is {100 * worst:.0f} % off"
    ) in README


def test_figures_of_the_own_card_are_those_that_were_measured() -> None:
    """The README has how many figures of the H100 an emulated one repeats to the byte."""
    file = RESULTS / "card-h100" / "commands.json"
    both = json.loads(file.read_text("utf-8"))["published"].values()
    pairs = [(size, row["emulated"][name]) for row in both for name, size in row["card"].items()]
    equal = sum(card == emulated for card, emulated in pairs)
    assert f"of {len(pairs)} published figures {equal} are equal" in README
    compared = json.loads((RESULTS / "card-h100" / "compared.json").read_text("utf-8"))
    peaks = [
        abs(row["here_peak"] / row["card_peak"] - 1)
        for row in compared["programs"]
        if "card_peak" in row and "here_peak" in row
    ]
    same, close = (sum(error <= most for error in peaks) for most in (0, 0.01))
    assert f"of {len(peaks)} programs on an emulated one the peak is equal in {same} and" in README
    assert f"within 1 % in {close}," in README


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


def test_exact_replays_are_those_that_were_compared() -> None:
    """The README has how many published recordings of CUDA cards replay exactly."""
    (file,) = RESULTS.glob("recordings-torch-*.json")
    exact = [
        row["differing"] == 0
        for row in json.loads(file.read_text("utf-8"))
        if row.get("events", 0) > 1 and not row["recording"].startswith("codeasier+MemSnapDump+")
    ]  # that repository has recordings of an Ascend NPU
    assert f"[{sum(exact)} of {len(exact)}](docs/how-to/snapshots.md" in README


def test_networks_that_two_counters_agree_on_are_those_that_were_measured() -> None:
    """The README has how many networks were measured, and in all of them every byte is equal."""
    (file,) = RESULTS.glob("crosscheck-*.json")
    rows = json.loads(file.read_text("utf-8"))["rows"]
    stages = [stage for row in rows for stage in row["stages"]]
    assert stages
    for figure in ("live_bytes", "peak_bytes"):
        assert [s for s in stages if s[figure] != s[f"counted_{figure}"]] == []
    assert f"those of an independent counter in {len(rows)} networks of torchvision" in README


def test_errors_of_fakegpu_are_those_of_the_page_that_has_them() -> None:
    """The README rounds what the page about several devices says of FakeGPU's own estimates."""
    page = prose(ROOT / "docs/explanation/ranks.md")
    low, high = re.findall(
        r"estimates of these eight peaks differ from them by (.+?) to (.+?) %", page
    )[0]
    assert f"FakeGPU: {float(low):.1f} to {float(high):.1f} % off on" in README
