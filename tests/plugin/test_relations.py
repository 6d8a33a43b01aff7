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


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("processes", [0, 2])
def test_relation_is_judged_at_the_end_if_the_other_test_runs_later(scripted, kept, processes):
    """The session fails, and the report has the breach; in one process and in several."""
    variants = ["compiled", "eager"]
    source = VARIANTS.format(tolerance="10%" if kept else "9%", variants=variants)
    options = ["-n2", "--dist=load"] if processes else []
    run = scripted(source, *options)
    verdicts = {region["nodeid"].partition("[")[2]: region["verdict"] for region in run.regions}
    assert verdicts["eager-1000]"] == verdicts["eager-2000]"] == "no limit"
    assert verdicts["compiled-1000]"] == verdicts["compiled-2000]"] == ("ok" if kept else "BREACH")
    assert run.result.ret == (0 if kept else 1)
    late = "FAILED: test_it.py::test_it[compiled-2000] forward: memory_baseline(relative_to='eager'"
    assert (late in run.text) != kept or processes  # with xdist, it may have run before


def test_relation_to_a_test_that_was_skipped_fails(scripted):
    """What was not compared must not pass."""
    source = VARIANTS.format(tolerance="10%", variants=["compiled", "eager"]).replace(
        "    with", "    if variant == 'eager': pytest.skip('no')\n    with"
    )
    run = scripted(source)
    assert [region["verdict"] for region in run.regions][:2] == ["BREACH", "BREACH"]
    assert run.result.ret == 1
    assert "test_it.py::test_it[eager-1000] has no completed region of this name" in run.text


def test_relation_that_only_warns_does_not_fail_the_session(scripted):
    """``warn=True`` holds for a relation that is judged at the end, too."""
    source = VARIANTS.format(tolerance="9%", variants=["compiled", "eager"])
    run = scripted(source.replace('tolerance="9%"', 'tolerance="9%", warn=True'))
    run.assert_outcomes(passed=4)
    assert [region["verdict"] for region in run.regions][:2] == ["warning", "warning"]
    assert "warning: test_it.py::test_it[compiled-1000] forward: memory_baseline(" in run.text


RELATIONS = """
import pytest

@pytest.mark.memory_baseline({arguments})
@pytest.mark.parametrize("variant", ["plain", "other"])
def test_it(cka_memory, meter, variant):
    with cka_memory.measure("forward"):
        meter.free(meter.allocate(1000 if variant == "plain" else {size}))
"""


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ('less_than="plain"', 999),
        ('at_most="0.5 x plain"', 500),
        ('at_most="2.5x plain"', 2500),
        ('relative_to="plain", saves="300 B"', 700),
        ('less_than="plain", at_most="0.9 x plain"', 900),
        ('relative_to="plain", tolerance="10%", at_most="0.9 x plain"', 900),
        ('less_than="plain", of="level"', 999),
    ],
)
def test_relation_is_exact_to_the_byte(scripted, arguments, most):
    """The largest size that keeps it passes, and one byte more fails."""
    run = scripted(RELATIONS.format(arguments=arguments, size=most))
    run.assert_outcomes(passed=2)
    assert [region["verdict"] for region in run.regions] == ["no limit", "ok"]
    run = scripted(RELATIONS.format(arguments=arguments, size=most + 1))
    run.assert_outcomes(passed=1, failed=1)


def test_message_of_a_relation_names_both_figures(scripted):
    """What was measured, what the other test needs, and by how much it is too much."""
    run = scripted(RELATIONS.format(arguments='at_most="0.5 x plain"', size=520))
    text = " ".join(run.text.split())
    assert (
        "memory_baseline(at_most='0.5 x plain') broken: peak increase 520 bytes, allowed 0.5 x "
        "test_it.py::test_it[plain]'s 1,000 bytes: 20 bytes too much"
    ) in text
    equal = scripted(RELATIONS.format(arguments='less_than="plain"', size=1000))
    text = " ".join(equal.text.split())
    assert "must be less than test_it.py::test_it[plain]'s 1,000 bytes: it is equal" in text


def test_committed_baseline_is_judged_beside_a_relation(scripted):
    """Both variants keep their lines: four times the memory in both fails both."""
    source = RELATIONS.format(arguments='relative_to="plain"', size="{size}")
    scripted(source.format(size=1000), "--cka-memory-update-baseline").assert_outcomes(passed=2)
    scripted(source.format(size=1000)).assert_outcomes(passed=2)
    grown = source.replace("1000 if", "4000 if").format(size=4000)
    scripted(grown).assert_outcomes(failed=2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("less_than=3", "less_than=3 is not the id of a pytest parameter"),
        ('at_most="plain"', "at_most='plain' must be a factor and the id"),
        ("at_most=0.5", "at_most=0.5 must be a factor"),
        ('saves="1 MB"', "saves='1 MB' needs a test to compare with"),
        ('relative_to="plain", saves=3', "saves=3 is not a memory size"),
        (
            'less_than="plain", of="speed"',
            "of='speed' is not a figure for comparing two tests",
        ),
        ('of="peak"', "of='peak' has no effect alone; also write less_than, at_most or"),
        ('less_than="absent"', "less_than='absent': no collected test of this function"),
        ('at_most="2 x absent"', "at_most='2 x absent': no collected test of this function"),
    ],
)
def test_wrong_relation_is_a_usage_error(scripted, arguments, problem):
    """The message says what to write instead."""
    scripted(RELATIONS.format(arguments=arguments, size=1000)).assert_refused(problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("'lazy'", ": no collected test"), ("3", " is not the id of a pytest parameter")],
)
def test_parameter_that_does_not_exist_is_a_usage_error(scripted, name, problem):
    """A name that no test has, and what is no name, stop the session."""
    source = VARIANTS.format(tolerance="10%", variants=["compiled"]).replace('"eager"', name, 1)
    scripted(source).assert_refused(f"relative_to={name}{problem}")
