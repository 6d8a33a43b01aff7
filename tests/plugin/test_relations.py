"""Relations between regions: in assertions, and between the parameters of one test."""

import re
from types import CodeType

import pytest

ASSERTS = """
import torch


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)

    def forward(self, values, copies):
        return [self.inner(values).exp() for _ in range(copies)]


def test_it(cka_memory):
    model = Block().to(cka_memory.device)
    values = torch.ones(16384, 64, device=cka_memory.device)
    with torch.no_grad():
        with cka_memory.measure("old") as old:
            model(values, 1)
        with cka_memory.measure("new") as new:
            model(values, 3)
    assert new.peak_increase_mb <= 1.1 * old.peak_increase_mb
"""


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.native),
        pytest.param("emulate:cuda", marks=pytest.mark.emulates),
    ],
)
def test_failed_comparison_of_two_regions_shows_their_differences_by_line(
    session, monkeypatch, device
):
    """Both regions are shown, and what the larger one needed more, with its line."""
    monkeypatch.setenv("COLUMNS", "200")
    run = session(ASSERTS, f"--cka-memory-device={device}", forked=True)
    run.assert_outcomes(failed=1)
    text = " ".join(run.text.split())
    assert "in region 'new', " in text
    assert "in region 'old', " in text
    new, old = (region["peak_increase_bytes"] for region in reversed(run.regions))
    assert new > old
    assert re.search(r"region 'new' has \+\d.* of peak increase compared with .* 'old': \+\d", text)
    place = text.partition("compared with region 'old': ")[2]
    made = r"Block.forward\S*: `self.inner\(values\).exp\(\)`"
    if not hasattr(CodeType, "co_positions"):  # in Python 3.10 the whole line
        made = r"<listcomp>: `return \[self.inner\(values\).exp\(\) for"
    assert re.search(rf"at test_it.py:\d+ in {made}", place)


def test_comparison_with_a_number_shows_no_differences(session):
    """An assertion about one region explains it as before."""
    source = ASSERTS.replace("1.1 * old.peak_increase_mb", "0")
    run = session(source, "--cka-memory-device=cpu", forked=True)
    run.assert_outcomes(failed=1)
    assert "compared with region" not in run.text


VARIANTS = """
import pytest

@pytest.mark.memory_baseline(relative_to="eager", tolerance="{tolerance}")
@pytest.mark.parametrize("size", [1000, 2000])
@pytest.mark.parametrize("variant", {variants})
def test_it(cka_memory, meter, variant, size):
    with cka_memory.measure("forward"):
        meter.free(meter.allocate(size if variant == "eager" else size * 11 // 10))
"""


@pytest.mark.parametrize(("tolerance", "kept"), [("10%", True), ("9%", False)])
def test_parameter_is_the_baseline_of_the_others(scripted, tolerance, kept):
    """Each test is compared with the one that differs in this parameter alone; equality passes."""
    source = VARIANTS.format(tolerance=tolerance, variants=["eager", "compiled"])
    run = scripted(source)
    run.assert_outcomes(passed=4 if kept else 2, failed=0 if kept else 2)
    verdicts = {region["nodeid"].partition("[")[2]: region["verdict"] for region in run.regions}
    assert verdicts["eager-1000]"] == verdicts["eager-2000]"] == "no limit"
    assert verdicts["compiled-1000]"] == verdicts["compiled-2000]"] == ("ok" if kept else "BREACH")
    if not kept:
        text = " ".join(run.text.split())
        assert "(9% above test_it.py::test_it[eager-2000]'s 2,000 bytes): 20 bytes too much" in text
        assert "memory_baseline(relative_to='eager', tolerance='9%') broken" in text


@pytest.mark.parametrize("required", [False, True])
def test_reference_that_has_not_run_is_not_judged(scripted, baseline_path, required):
    """Without figures of the other test the limit is not judged; required baselines break."""
    source = VARIANTS.format(tolerance="10%", variants=["compiled", "eager"])
    options = []
    if required:
        scripted("def test_other(cka_memory): pass", "--cka-memory-update-baseline")
        options = ["--cka-memory-require-baseline"]
    run = scripted(source, *options)
    run.assert_outcomes(passed=2 if required else 4, failed=2 if required else 0)
    verdicts = [region["verdict"] for region in run.regions]
    assert verdicts == [*["BREACH" if required else "not judged"] * 2, *["no limit"] * 2]
    assert baseline_path.exists() == required


@pytest.mark.parametrize("name", ["'lazy'", "3"])
def test_parameter_that_does_not_exist_is_a_usage_error(scripted, name):
    """A name that no test has, and what is no name, stop the session."""
    source = VARIANTS.format(tolerance="10%", variants=["compiled"]).replace('"eager"', name, 1)
    scripted(source).assert_refused(f"relative_to={name}: ")
