"""``--cka-memory-explain=graph``: pictures of what keeps memory, and values that are refused."""

TESTS = """
import torch

KEEP, LAST = [], {}


def test_two():
    x = torch.ones(1000)
    KEEP.append(x)
    LAST["x"] = x
"""
OPTIONS = (
    "--cka-memory-device=cpu",
    "--cka-memory-report",
    "--cka-memory-html=r.html",
    "-p",
    "no:cacheprovider",
)


def test_graph_draws_every_holder_in_the_page(session, pytester):
    """The page has a picture for each holder, and the JSON report the same references."""
    run = session(TESTS, *OPTIONS, "--cka-memory-explain=graph", forked=True)
    run.assert_outcomes(passed=1)
    (holding,) = run.regions[0]["retained"]
    starts = {tuple(link["reference"] for link in path) for path in holding["paths"]}
    assert starts == {("", "KEEP", "[0]"), ("", "LAST", "['x']")}
    page = (pytester.path / "r.html").read_text("utf-8")
    assert page.count("class='path'") == 2
    assert "both references must be removed to free it" in page


def test_option_without_a_value_draws_nothing_and_takes_no_file(session, pytester):
    """The option works as before: a file behind it is a file, and nothing is drawn."""
    run = session(TESTS, *OPTIONS, "--cka-memory-explain", "test_it.py", forked=True)
    run.assert_outcomes(passed=1)
    (holding,) = run.regions[0]["retained"]
    assert holding["held_by"]
    assert "paths" not in holding
    assert "holders-title" not in (pytester.path / "r.html").read_text("utf-8")


def test_another_value_is_refused(session):
    """The error names both forms and the value."""
    run = session(TESTS, *OPTIONS, "--cka-memory-explain=paths")
    run.assert_refused("--cka-memory-explain/--cka-memory-explain=graph", "'paths'")


def test_graph_without_a_report_is_refused(session):
    """Without a page or a JSON report nothing would show it, so that is a usage error."""
    run = session(TESTS, "--cka-memory-explain=graph", writes_json=False)
    run.assert_refused("--cka-memory-explain=graph: ", "add --cka-memory-html=PATH")
