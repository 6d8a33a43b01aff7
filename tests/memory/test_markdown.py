"""The Markdown report: its exact text, its escapes, and GitHub's limit on its length."""

import html
import re
from dataclasses import replace

import pytest
from reports_made import (
    HOSTILE,
    SESSION,
    ZERO,
    broken,
    hostile,
    kept,
    many,
    one_of_each,
    record,
)

from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports import code, markdown

FACTS = """\
- device: cuda:0 (A100)
- meter: PyTorch's caching allocator
- note: memory outside the allocator is not seen
- versions: torch 2.15.0, CUDA 13.2, Python 3.11.7, plugin 0.1.0
- started: `2026-01-02T03:04:05+00:00`
"""
HIGHEST = "- highest level: `100.00 MB in t.py::test_kept`\n"
LEGEND = """\

Sizes are in MB (2**20 bytes) unless a unit is given. start: in use when the region began; \
peak: most memory in use at once; increase: peak - start; retained: allocated inside and still \
live at the end; growth/b: rise of the highest level per batch, from 5 full batches on.
"""
WHOLE = f"""\
### Memory: 1 of 5 regions broke a limit, 2 not judged, 1 test without a result, 2 not measured

| verdict | region | why |
| :--- | :--- | :--- |
| **BREACH** | `t.py::test_leak[64] train` | `zero_retention`: retained 36 bytes, allowed 0 bytes: \
36 bytes too much |
| **BREACH** | `t.py::test_leak[64] train` | `flat_per_batch`: grew by 4 bytes per batch over 9 \
batches, allowed 0 bytes per batch |
| not judged | `t.py::test_cpu` | `max_reserved_mb(1)`: this device has no reserve |
| not judged | `t.py::test_fails` | the test failed |

<details><summary><code>t.py::test_leak[64] train</code>, <code>zero_retention</code>: who holds \
it</summary>

```text
  9 tensors, 36 bytes, float32 largest () by aten.sum, allocated in 9 batches
    made at train.py:12 in step: `(weight * batch).sum()`, from train.py:40 in fit
    held by train.LOSSES[0]
    what to do: keep loss.item() instead of the tensor, which keeps its autograd graph alive
  explains 36 of 36 B
```

</details>

<details><summary><code>t.py::test_leak[64] train</code>, <code>flat_per_batch</code>: who holds \
it</summary>

```text
  ▁▂▃▄▅▅▆▇█  0 to 32 B above the first batch
  9 tensors, 36 bytes, made at train.py:12: as above
```

</details>

<details><summary>All regions: 5</summary>

| region | verdict | timeline | batches | start | peak | increase | retained | growth/b |
| :--- | :--- | :--- | ---: | ---: | ---: | ---: | ---: | ---: |
| `t.py::test_leak[64] train` | BREACH | ▁▂▃▄▅▅▆█ | 9 | 42.00 | 100.00 | 58.00 | 36 B | 4 B |
| `t.py::test_cpu` | not judged | ▁▁▁▁▁▁▁▁ | 9 | 42.00 | 100.00 | 58.00 | 0 | 0 |
| `t.py::test_fails` | not judged | ▁▁▁▁▁▁▁▁ | 9 | 42.00 | 100.00 | 58.00 | 0 | 0 |
| `t.py::test_free` | no limit | ▁▁▁▁▁▁▁▁ | 9 | 42.00 | 100.00 | 58.00 | 0 | 0 |
| `t.py::test_kept` | ok | ▁▁▁▁▁▁▁▁ | 9 | 42.00 | 100.00 | 58.00 | 0 | 0 |

</details>

{FACTS.replace("- started", HIGHEST + "- started")}- not measured: 2 tests: odd items
- no result: `t.py::test_lost`
{LEGEND}"""


def test_at_most_ten_tests_without_a_result_are_named():
    """At most ten tests without a result are named, and the others are counted."""
    missing = tuple(f"t.py::test_{number}" for number in range(12))
    text = markdown.render(replace(one_of_each(), missing=missing))
    assert text.count("- no result: `t.py::test_") == 10
    assert "- no result: and 2 more\n" in text


def test_a_report_with_every_verdict_has_exactly_this_text():
    """The report with each verdict has this text: verdict, findings, holders, regions, session."""
    assert markdown.render(one_of_each()) == WHOLE


def test_a_report_without_regions_begins_with_nothing_was_measured():
    """A report without regions says so first, because no limit was kept in it."""
    assert markdown.render(Report(SESSION, ())) == (
        f"### Memory: nothing was measured\n\n{FACTS}{LEGEND}"
    )


@pytest.mark.parametrize(
    ("results", "line"),
    [
        ([kept()], "1 region kept every limit"),
        ([kept(), kept()], "2 regions kept every limit"),
        ([kept(), broken()], "1 of 2 regions broke a limit"),
        ([judge("n", record(), [])], "1 region measured, no limits set"),
        ([kept(), judge("n", record(), [])], "1 of 2 regions kept every limit"),
        ([replace(kept(), record=record(completed=False))], "1 not judged"),
    ],
    ids=["one", "two", "broken", "no-limit", "some-limits", "not-judged"],
)
def test_the_first_line_is_the_verdict(results, line):
    """The verdict is the first line, so that a reviewer can stop reading there."""
    assert markdown.render(Report(SESSION, tuple(results))).splitlines()[0] == f"### Memory: {line}"


def test_a_problem_of_the_session_follows_the_verdict():
    """A problem of the session, such as too few regions, follows after the verdict."""
    report = Report(SESSION, (), problems=("0 regions measured, --cka-memory-min-regions=1",))
    assert markdown.render(report).splitlines()[2] == (
        "**FAILED**: `0 regions measured, --cka-memory-min-regions=1`"
    )


def test_emulated_figures_are_marked_before_the_first_figure():
    """Emulated figures are marked in the title and in a sentence below it."""
    session = {**SESSION, "meter": "PyTorch's caching allocator, emulated device"}
    lines = markdown.render(Report(session, (kept(),))).splitlines()
    assert lines[0] == "### Emulated memory: 1 region kept every limit"
    assert lines[2] == (
        "These figures come from torch's CUDA allocator on an emulated device; no GPU was used."
    )


def test_text_from_a_test_is_never_interpreted_as_markup():
    """No part of a hostile name is markup outside code spans and code blocks."""
    text = markdown.render(hostile())
    outside, blocks = re.subn(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks == 2
    for line in outside.splitlines():
        bare = _without_code_spans(line)
        for mark in ("<img", "@user", "http:", "<!--", "*b*", "\x1b", "#1"):
            assert mark not in bare, line
    assert "\x1b" not in text
    assert "\u2028" not in text


def _without_code_spans(line):
    """Return `line` without its code spans. In CommonMark a span ends at a run of as many backticks
    as began it.
    """
    line = re.sub(r"<code>([^<]*)</code>", "", line)
    assert html.escape(HOSTILE) not in line
    bare, rest = "", line
    while (opening := re.search(r"`+", rest)) is not None:
        bare += rest[: opening.start()]
        rest = rest[opening.end() :]
        closing = re.search(rf"(?<!`){opening[0]}(?!`)", rest)
        assert closing is not None, line
        rest = rest[closing.end() :]
    return bare + rest


def test_every_row_has_as_many_cells_as_its_header():
    """A bar in a name does not end a table's cell, not even inside a code span."""
    lines = [line for line in markdown.render(hostile()).splitlines() if line.startswith("| ")]
    borders = [line.replace("\\|", "").count("|") for line in lines]
    assert borders == [4, 4, 4, 4, 10, 10, 10]


@pytest.mark.parametrize("limit", [markdown.COMMENT_CHARACTERS, markdown.JOB_SUMMARY_CHARACTERS])
def test_a_report_of_many_regions_keeps_to_the_limit_on_length(limit):
    """In a report that is too long for either limit, what is left out is counted in each table."""
    text = markdown.render(many(2_500), limit)
    assert limit - 3_000 < len(text) <= limit
    assert text.startswith("### Memory: 417 of 2,500 regions broke a limit\n")
    shown = [line for line in text.splitlines() if line.startswith("| **BREACH**")]
    counted = [line for line in text.splitlines() if line.endswith("more, in the JSON report |")]
    assert counted[0] == f"| and {2 * 417 - len(shown):,} more, in the JSON report |"
    rows = [line for line in text.splitlines() if line.endswith((" 0 |", " 4 B |"))]
    assert counted[1] == f"| and {2_500 - len(rows):,} more, in the JSON report |"
    assert "The holders of " in text
    assert text.endswith(LEGEND)


def test_cut_table_has_every_test_before_a_second_row_of_one():
    """A test with hundreds of broken limits leaves room for the one that follows it."""
    regions = [
        judge("t.py::test_many", record(str(number), retained_bytes=4), [ZERO])
        for number in range(900)
    ]
    text = markdown.render(Report(SESSION, (*regions, broken("t.py::test_last"))))
    assert "more, in the JSON report" in text
    (first, second, *_) = [row for row in text.splitlines() if row.startswith("| **BREACH**")]
    assert "t.py::test_many 0" in first
    assert "t.py::test_last" in second


def test_long_names_are_cut_in_their_middle():
    """A long name loses its middle: its beginning has the file, its end the parameters."""
    assert code("a" * 100 + "b" * 100) == f"`{'a' * 79}…{'b' * 79}`"


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("plain", "`plain`"),
        ("a`b", "``a`b``"),
        ("`a`", "`` `a` ``"),
        ("a``b", "```a``b```"),
        (" a ", "`  a  `"),
        ("", "''"),
        ("a\nb", "`a\\nb`"),
    ],
    ids=["plain", "tick", "ends", "two", "spaces", "empty", "lines"],
)
def test_a_code_span_can_contain_any_text(text, span):
    """A code span can contain any text, as checked against section 6.1 of CommonMark."""
    assert code(text) == span
