"""Output and exit status of ``python -m pytest_cka_memory``."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from reports_made import SESSION, broken, hostile, kept, one_of_each, record

from pytest_cka_memory.cli.main import OK, REGRESSION, UNUSABLE, main
from pytest_cka_memory.core.report import Report
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports import markdown, terminal
from pytest_cka_memory.reports.html import page as html_page
from pytest_cka_memory.stored import json_report as json_writer
from pytest_cka_memory.stored.json_report import read
from pytest_cka_memory.units import MB


@pytest.fixture
def write(tmp_path):
    """Write a report, or a list of results, to a file and return its path."""

    def write_it(name, report):
        if not isinstance(report, Report):
            report = Report(SESSION, tuple(report))
        path = tmp_path / f"{name}.json"
        path.write_text(json_writer.render(report), encoding="utf-8", errors="backslashreplace")
        return str(path)

    return write_it


def region(nodeid, **figures):
    return judge(nodeid, record(**figures), [])


def test_show_prints_the_table_again(write, capsys, monkeypatch):
    """``show`` prints the session's table and all that options can add to it."""
    monkeypatch.setenv("COLUMNS", "110")
    assert main(["show", write("r", one_of_each())]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.text for line in terminal.section(one_of_each(), 110)]
    head = "region batches start peak increase retained growth/b timeline verdict"
    assert " ".join(lines[0].split()) == head
    assert "BREACH t.py::test_leak[64] train" in lines
    assert "2 not measured: odd items" in lines
    assert "  t.py::test_lost" in lines


def test_show_prints_markdown(write, capsys):
    """``show --format=markdown`` prints the file that --cka-memory-markdown writes."""
    assert main(["show", write("r", one_of_each()), "--format", "markdown"]) == OK
    assert capsys.readouterr().out == markdown.render(one_of_each())


def test_show_prints_a_report_without_regions(write, capsys):
    """For a report without regions ``show`` says that nothing was measured."""
    assert main(["show", write("r", [])]) == OK
    assert capsys.readouterr().out.startswith("nothing was measured\ndevice: cuda:0 (A100)")


PREDICTED = str(Path(__file__).with_name("predicted_report.json"))
"""A report that an earlier version wrote on ``predict:cuda:t4``, which was removed later."""


def test_show_prints_a_report_of_a_predicted_device(capsys, monkeypatch):
    """``show`` prints the figures and the notes of a predicted device as the session did."""
    monkeypatch.setenv("COLUMNS", "110")
    assert main(["show", PREDICTED]) == OK
    lines = capsys.readouterr().out.splitlines()
    rows = [" ".join(line.split()) for line in lines]
    assert "test_product product - 1.02 9.16 8.14 0 - 22.00 no limit" in rows
    assert "device: predict:cuda:t4 (NVIDIA T4, predicted), torch 2.15.0+cu132" in lines
    assert "  PREDICTED, not measured: no GPU ran" in lines


def test_other_formats_label_the_figures_of_a_predicted_device(capsys, tmp_path):
    """Other formats label figures of a predicted device, which must not pass for measurements."""
    notice = "These figures are predicted for the device; they were not measured on it."
    assert main(["show", PREDICTED, "--format", "markdown"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("### Predicted memory: ")
    assert lines[2] == notice
    page = tmp_path / "page.html"
    assert main(["html", PREDICTED, "-o", str(page)]) == OK
    assert "<h1>Predicted memory</h1>" in page.read_text("utf-8")
    assert notice in page.read_text("utf-8")


def test_compare_reads_a_report_of_a_predicted_device(write, capsys):
    """``compare`` warns with both devices' names if one report is predicted and one is measured."""
    before = read(Path(PREDICTED))
    emulated = {
        "device": "emulate:cuda:t4",
        "device_name": "emulated NVIDIA T4 (no GPU)",
        "meter": "PyTorch's caching allocator, emulated device",
    }
    after = write("new", replace(before, session={**before.session, **emulated}))
    assert main(["compare", PREDICTED, after]) == OK
    output = capsys.readouterr().out
    assert "measured on NVIDIA T4, predicted, now on emulated NVIDIA T4 (no GPU)" in output
    assert "compared: none of 2 regions rose by more than 5%" in output


def test_html_writes_the_page_that_the_option_writes(write, tmp_path):
    """``html`` writes the page that --cka-memory-html writes, and creates missing folders."""
    page = tmp_path / "new" / "page.html"
    assert main(["html", write("r", one_of_each()), "-o", str(page)]) == OK
    assert page.read_text(encoding="utf-8") == html_page.render(one_of_each())


@pytest.mark.parametrize("alias", ["r.json", "./r.json", "link.json"])
def test_html_never_overwrites_its_input(write, tmp_path, monkeypatch, capsys, alias):
    """``html`` does not overwrite its input, even if paths are spelled differently or one is a
    link.
    """
    source = write("r", one_of_each())
    (tmp_path / "link.json").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    assert main(["html", source, "-o", alias]) == UNUSABLE
    assert "is the input file itself; write another path" in capsys.readouterr().err
    assert (tmp_path / "r.json").read_text("utf-8") == json_writer.render(one_of_each())


def test_schema_prints_the_schema(capsys):
    """``schema`` prints the JSON schema, so that validators can read it from a file."""
    assert main(["schema"]) == OK
    assert json.loads(capsys.readouterr().out)["title"] == json_writer.SCHEMA


BEFORE = [
    region("t.py::test_same"),
    region("t.py::test_rose"),
    region("t.py::test_rose"),
    region("t.py::test_gone"),
    region("t.py::test_fails", completed=False),
]
AFTER = [
    region("t.py::test_rose"),
    region("t.py::test_rose", peak_bytes=104 * MB, retained_bytes=900),
    region("t.py::test_same", peak_bytes=99 * MB),
    region("t.py::test_new"),
    region("t.py::test_fails"),
]
TABLE = """\
region              figure              old    new  change  verdict
t.py::test_rose #2  peak increase     58.00  62.00   +6.9%  REGRESSION
t.py::test_rose #2  retained              0  900 B  +900 B  REGRESSION
t.py::test_rose #2  growth per batch      0  100 B  +100 B  REGRESSION
t.py::test_same     peak increase     58.00  57.00   -1.7%  less

only in the new report: t.py::test_new
only in the old report: t.py::test_gone
not compared, because an exception ended it: t.py::test_fails
compared: 1 of 3 regions rose by more than 5%, 1 new, 1 gone, 1 not judged
"""
MARKDOWN = """\
### Memory compared: 1 of 3 regions rose by more than 5%, 1 new, 1 gone, 1 not judged

| region | verdict | figure | old | new | change |
| :--- | :--- | :--- | ---: | ---: | ---: |
| `t.py::test_rose #2` | REGRESSION | peak increase | 58.00 | 62.00 | +6.9% |
| `t.py::test_rose #2` | REGRESSION | retained | 0 | 900 B | +900 B |
| `t.py::test_rose #2` | REGRESSION | growth per batch | 0 | 100 B | +100 B |
| `t.py::test_same` | less | peak increase | 58.00 | 57.00 | -1.7% |

- `only in the new report: t.py::test_new`
- `only in the old report: t.py::test_gone`
- `not compared, because an exception ended it: t.py::test_fails`
"""


@pytest.mark.parametrize(("form", "text"), [("table", TABLE), ("markdown", MARKDOWN)])
def test_compare_prints_the_differences(write, capsys, form, text):
    """``compare`` prints regressions first, then lower figures, then what has no counterpart."""
    files = write("old", BEFORE), write("new", AFTER)
    assert main(["compare", *files, "--format", form]) == REGRESSION
    assert capsys.readouterr().out == text


def test_docs_show_the_output_of_compare():
    """The table in the documentation is the one that ``compare`` prints."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "reports.md"
    assert f"```text\n{TABLE}```\n" in page.read_text(encoding="utf-8")


def test_compare_treats_a_figure_that_became_unknown_as_a_regression(write, capsys):
    """A figure that became unknown is a regression, because too few batches may hide a leak."""
    files = write("old", [region("n")]), write("new", [region("n", batches=3)])
    assert main(["compare", *files]) == REGRESSION
    row = capsys.readouterr().out.splitlines()[1]
    assert " ".join(row.split()) == "n growth per batch 0 - - REGRESSION"


def test_compare_lists_ten_new_regions_and_counts_the_rest(write, capsys):
    """If a whole suite is renamed, ten new regions are listed and the others are counted."""
    twelve = [region(f"t.py::test_new[{number}]") for number in range(12)]
    assert main(["compare", write("old", [kept()]), write("new", [kept(), *twelve])]) == OK
    output = capsys.readouterr().out
    assert output.count("only in the new report: t.py::test_new[") == 10
    assert "only in the new report: 2 more\n" in output


def test_cut_comparison_has_every_test_before_a_second_row_of_one(write, capsys):
    """Of more than 200 regressions, the one of the last test is shown, and the rest is counted."""
    labels = [str(number) for number in range(300)]
    files = [
        write(
            name,
            [
                *(region("t.py::test_many", label=label, retained_bytes=size) for label in labels),
                region("t.py::test_last", retained_bytes=size),
            ],
        )
        for name, size in (("old", 0), ("new", 8))
    ]
    assert main(["compare", *files]) == REGRESSION
    output = capsys.readouterr().out
    assert "and 101 more; --format json prints all" in output
    assert "t.py::test_last" in output
    assert main(["compare", *files, "--format", "markdown"]) == REGRESSION
    assert "t.py::test_last" in capsys.readouterr().out


def test_compare_prints_json(write, capsys):
    """``compare`` prints JSON with everything that a script needs."""
    files = write("old", BEFORE), write("new", AFTER)
    assert main(["compare", *files, "--format", "json"]) == REGRESSION
    found = json.loads(capsys.readouterr().out)
    assert (found["tolerance"], found["compared"], found["regressions"]) == ("5%", 3, 3)
    assert found["changes"][0] == {
        "nodeid": "t.py::test_rose",
        "label": "",
        "rank": "",
        "occurrence": 2,
        "figure": "peak_increase_bytes",
        "old_bytes": 58 * MB,
        "new_bytes": 62 * MB,
        "allowed_bytes": int(58 * MB * 1.05),
        "regression": True,
    }
    assert [key["nodeid"] for key in found["appeared"]] == ["t.py::test_new"]
    assert [key["nodeid"] for key in found["vanished"]] == ["t.py::test_gone"]
    assert [key["nodeid"] for key in found["not_judged"]] == ["t.py::test_fails"]
    assert found["differing"] == []


@pytest.mark.parametrize(
    ("tolerance", "peak", "status"),
    [
        ("10%", 42 * MB + 110_000, OK),
        ("10%", 42 * MB + 110_001, REGRESSION),
        ("64 B", 42 * MB + 100_064, OK),
        ("64 B", 42 * MB + 100_065, REGRESSION),
        ("0%", 42 * MB + 100_000, OK),
        ("0%", 42 * MB + 100_001, REGRESSION),
        ("0%", 42 * MB, OK),
    ],
    ids=["percent", "percent-plus-1", "size", "size-plus-1", "equal", "equal-plus-1", "less"],
)
def test_compare_tolerance_is_exact_to_the_byte(write, tolerance, peak, status):
    """``compare`` accepts a rise equal to the tolerance; one byte more is a regression."""
    old = write("old", [region("n", peak_bytes=42 * MB + 100_000)])
    new = write("new", [region("n", peak_bytes=peak)])
    assert main(["compare", old, new, f"--tolerance={tolerance}"]) == status


def test_compare_ignores_which_worker_ran_a_region(write):
    """``compare`` ignores which worker ran a region; ranks, in contrast, are matched."""
    old = replace(region("n"), worker="gw0")
    assert main(["compare", write("o", [old]), write("n", [replace(old, worker="gw3")])]) == OK
    ranks = [replace(region("n", peak_bytes=(100 + n) * MB), worker=f"rank {n}") for n in (0, 1)]
    assert main(["compare", write("o", ranks), write("n", ranks[::-1]), "--tolerance=0%"]) == OK


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        ("device_name", "H200", "measured on A100, now on H200"),
        ("torch", "2.16.1", "measured on torch 2.15, now on torch 2.16"),
        ("cuda", "12.8", "measured on CUDA 13.2, now on CUDA 12.8"),
        ("meter", "another", "measured on PyTorch's caching allocator, now on another"),
    ],
)
def test_compare_warns_about_another_device_or_version(write, capsys, fact, value, message):
    """``compare`` warns if device or version differ, since figures may then change without code."""
    old = write("old", Report(SESSION, (kept(),)))
    new = write("new", Report({**SESSION, fact: value}, (kept(),)))
    assert main(["compare", old, new]) == OK
    assert (
        f"warning: the reports differ in more than the code: {message}\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize("kept_more", [0, 10 * MB])
def test_compare_leaves_out_a_figure_that_only_one_device_has(write, capsys, kept_more):
    """A figure that one of the devices lacks, such as a CPU's reserve, is not compared."""
    cuda = region("n", reserved_start_bytes=0, reserved_peak_bytes=2 * MB, reserved_end_bytes=0)
    cpu = {**SESSION, "device": "cpu", "device_name": "EPYC", "meter": "m", "cuda": None}
    new = Report(cpu, (region("n", retained_bytes=kept_more),))
    files = write("old", Report(SESSION, (cuda,))), write("new", new)
    assert main(["compare", *files]) == (REGRESSION if kept_more else OK)
    shown = capsys.readouterr().out
    assert (
        "reserve increase: not compared, because only one of the devices has this figure\n" in shown
    )
    assert "measured on CUDA 13.2, now on no CUDA\n" in shown
    assert main(["compare", *files[::-1]]) == OK
    assert main(["compare", files[0], write("same", [region("n")])]) == REGRESSION


@pytest.mark.parametrize(
    ("without_scratch", "status"), [(50 * MB, OK), (53 * MB, REGRESSION), (None, OK)]
)
def test_compare_leaves_out_what_depends_on_a_fact_that_differs(
    write, capsys, without_scratch, status
):
    """A peak with scratch memory is not compared; that without it, if both have it, is."""
    cpu = {**SESSION, "device": "cpu", "meter": "m", "cuda": None}
    found = []
    old_bytes = without_scratch and 50 * MB  # reports of older versions have none
    for name, threads, peak, less in (
        ("old", "1", 60, old_bytes),
        ("new", "2", 90, without_scratch),
    ):
        record = region("n", peak_bytes=peak * MB, peak_without_scratch_bytes=less)
        found.append(write(name, Report({**cpu, "conditions": {"threads": threads}}, (record,))))
    assert main(["compare", *found]) == status
    shown = capsys.readouterr().out
    assert (
        "peak increase: not compared, because the reports differ in threads 1 -> 2. All other"
        in shown
    )
    assert ("peak increase without scratch memory" in shown) == (status == REGRESSION)
    assert main(["compare", *found, "--format", "json"]) == status
    plain = json.loads(capsys.readouterr().out)
    assert plain["figures_undecided"] == ["peak_increase_bytes"]
    assert plain["conditions"] == [{"fact": "threads", "old": "1", "new": "2"}]


def test_compare_does_not_warn_about_a_patch_release(write, capsys):
    """``compare`` does not warn of another patch release of torch,
    which allocates in the same way.
    """
    old = write("old", Report(SESSION, (kept(),)))
    new = write("new", Report({**SESSION, "torch": "2.15.1+cu132"}, (kept(),)))
    assert main(["compare", old, new]) == OK
    assert "figures may differ" not in capsys.readouterr().out


@pytest.mark.parametrize("other", [[], [region("other")], [region("n", completed=False)]])
def test_compare_fails_if_there_is_nothing_to_compare(write, capsys, other):
    """``compare`` fails if it compared nothing, because a check in CI must not pass then."""
    assert main(["compare", write("old", [region("n")]), write("new", other)]) == UNUSABLE
    assert "nothing to compare: no region ran to its end in both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["show"], "the following arguments are required: FILE"),
        (["show", "none.json"], "cannot read none.json: No such file"),
        (["compare", "none.json", "none.json", "--tolerance=5"], "cannot read '5' as a tolerance"),
        (["html", "none.json"], "the following arguments are required: -o"),
        (["show", "none.json", "--format=xml"], "invalid choice: 'xml'"),
    ],
    ids=["nothing", "no-file", "no-such-file", "tolerance", "no-output", "format"],
)
def test_wrong_arguments_exit_with_status_2(run_python, tmp_path, args, message):
    """For wrong arguments the exit status is 2, and the error is a sentence without a traceback."""
    done = run_python("-m", "pytest_cka_memory", *args, cwd=tmp_path)
    assert done.returncode == UNUSABLE
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_show_prints_any_name_on_an_ascii_terminal(run_python, write):
    """``show`` prints any name on an ASCII terminal, escaped and without terminal sequences."""
    ascii_terminal = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    path = write("r", hostile())
    done = run_python("-m", "pytest_cka_memory", "show", path, **ascii_terminal)
    assert done.returncode == OK, done.stderr
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii()


def test_error_about_a_damaged_report_is_one_line(tmp_path, capsys):
    """An error about a damaged report is one line: line ends and escape sequences are escaped."""
    text = json_writer.render(one_of_each())
    path = tmp_path / "r.json"
    path.write_text(text.replace('"odd items": 2', '"\\u001b[2J\\n": "2"'), encoding="utf-8")
    assert main(["show", str(path)]) == UNUSABLE
    error = capsys.readouterr().err
    assert "unmeasured.\\x1b[2J\\n is '2'; expected a whole number; write a report with" in error
    assert error.count("\n") == 1
    assert "\x1b" not in error


@pytest.mark.slow
def test_closed_output_pipe_is_not_an_error(write):
    """A reader that closes the pipe early, as ``show r.json | head`` does, causes no error."""
    path = write("r", [broken(f"t.py::test_{n}") for n in range(2_000)])
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest_cka_memory", "show", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # if it is set, Python exits silently
    )
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == OK
    assert errors == b""


def test_commands_do_not_import_torch(run_python, write):
    """Importing torch takes over a second, and it may be missing, so commands do not import it."""
    path = write("r", one_of_each())
    code = (
        "import sys; from pytest_cka_memory.cli.main import main; "
        f"main(['show', {path!r}]); main(['compare', {path!r}, {path!r}]); "
        f"main(['html', {path!r}, '-o', {path + '.html'!r}]); "
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
