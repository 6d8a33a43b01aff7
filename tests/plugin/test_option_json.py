"""``--cka-memory-json``: the report as a file, written completely or not at all."""

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from pytest_cka_memory.reports import files

SOURCE = """
import pytest

@pytest.mark.max_retained_mb("1 B")
def test_leaks(cka_memory, meter):
    with cka_memory.measure("épö ✓") as region:
        for size in (4, 4, 4, 4, 4, 2):
            meter.free(meter.allocate(100))
            meter.allocate(1)
            region.batch_done(size)

def test_whole(cka_memory, meter): meter.allocate(5)
"""
BYTES = (
    "start_bytes",
    "end_bytes",
    "peak_bytes",
    "peak_increase_bytes",
    "retained_bytes",
    "net_bytes",
)
RESERVES = (
    "reserved_start_bytes",
    "reserved_peak_bytes",
    "reserved_end_bytes",
    "reserved_after_cleaning_bytes",
    "one_time_bytes",
)


def test_report_has_every_documented_key(scripted):
    """The JSON report has every documented key, with a value of the documented type."""
    run = scripted(SOURCE)
    report = run.report
    assert report["schema"] == "pytest-cka-memory/1"
    head = report["session"]
    for key in ("device", "device_name", "meter", "python", "plugin"):
        assert isinstance(head[key], str), key
    assert {"torch", "cuda"} <= set(head)
    assert head["cuda"] is None
    assert head["workers"] == 1
    assert datetime.fromisoformat(head["started"]).tzinfo is not None
    leak, whole = report["regions"]
    for region in (leak, whole):
        assert isinstance(region["nodeid"], str)
        assert isinstance(region["label"], str)
        assert region["worker"] == "main"
        for key in BYTES:
            assert type(region[key]) is int, key
        for key in RESERVES:
            assert region[key] is None, key
    assert leak["label"] == "épö ✓"
    assert leak["outcome"] == "failed"
    assert leak["batches"] == 6
    assert leak["growth_bytes_per_batch"] == 1.0
    assert isinstance(leak["growth_bytes_per_batch"], float)
    for number, sample in enumerate(leak["timeline"], start=1):
        assert sample["batch"] == number
        assert sample["size"] == (2 if number == 6 else 4)
        assert sample["allocated_bytes"] == number
        assert sample["peak_bytes"] == number - 1 + 100
    (breach,) = leak["breaches"]
    assert breach["limit"] == "max_retained_mb('1 B')"
    assert (breach["allowed_bytes"], breach["measured_bytes"]) == (1, 6)
    assert breach["message"] == "retained 6 bytes, allowed 1 byte: 5 bytes too much"
    assert whole["label"] == ""
    assert whole["growth_bytes_per_batch"] is None
    assert whole["timeline"] == []


def test_reserve_is_reported_if_the_device_has_one(scripted_reserve):
    """On a device with a reserve, its levels and one-time allocations are integers."""
    run = scripted_reserve(
        """
        def test_it(cka_memory, meter):
            meter.allocate(100)
            with cka_memory.measure():
                meter.use_workspace(64)
                meter.free(meter.allocate(10))
        """
    )
    region = run.region
    assert (region["reserved_start_bytes"], region["reserved_end_bytes"]) == (100, 174)
    assert region["reserved_after_cleaning_bytes"] == 100
    assert region["reserved_peak_bytes"] == 174
    assert region["one_time_bytes"] == 64
    assert region["retained_bytes"] == 0


@pytest.mark.parametrize("path", ["made/for/it/r.json", "./r.json", "é r.json"])
def test_missing_folders_are_created_below_the_working_folder(scripted, pytester, path):
    """A path on the command line is relative to the folder in which pytest was called."""
    inner = pytester.mkdir("inner")
    pytester.makeini("[pytest]\n")
    (inner / "test_in.py").write_text("def test_it(cka_memory): pass")
    pytester._monkeypatch.chdir(inner)
    run = scripted(None, f"--cka-memory-json={path}", writes_json=False)
    run.assert_outcomes(passed=1)
    assert json.loads((inner / path).read_text("utf-8"))["regions"]
    run.result.stdout.fnmatch_lines([f"figures written to *{path.removeprefix('./')}"])


@pytest.mark.parametrize("option", ["--help", "--markers", "--version", "--collect-only"])
def test_options_that_run_no_test_create_no_folder(scripted, pytester, option):
    """Options that run no test create no folder, as the path is checked when a session starts."""
    run = scripted(None, option, "--cka-memory-json=new/r.json", writes_json=False)
    assert run.result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert not (pytester.path / "new").exists()


def test_tilde_is_expanded_to_the_home_folder(scripted, pytester):
    """A shell does not expand a tilde after an equals sign, so the plugin does."""
    run = scripted("def test_it(cka_memory): pass", "--cka-memory-json=~/h.json", writes_json=False)
    run.assert_outcomes(passed=1)
    assert (Path.home() / "h.json").is_file()  # pytester's own home folder
    assert not (pytester.path / "~").exists()


def test_link_is_kept_and_its_target_is_replaced(tmp_path):
    """If the path is a link, its target is replaced, as by programs that write through it."""
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "link.json", tmp_path / "far" / "r.json"
    file.write_text("old")
    link.symlink_to(file)
    files.check_writable(link)
    files.write_whole(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_pipe_is_written_to_and_not_replaced(tmp_path):
    """A named pipe, or /dev/null, is written to and still there afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.check_writable(pipe)
    files.write_whole(pipe, "through it")
    assert os.read(reader, 100) == b"through it"
    os.close(reader)
    assert pipe.is_fifo()


def test_paths_in_the_ini_file_are_relative_to_it(scripted, pytester):
    """A path in the ini file is relative to it, in whichever folder pytest is called."""
    inner = pytester.mkdir("inner")
    pytester.makeini("[pytest]\ncka_memory_json = out/r.json\n")
    (inner / "test_in.py").write_text("def test_it(cka_memory): pass")
    pytester._monkeypatch.chdir(inner)
    scripted(None, writes_json=False).assert_outcomes(passed=1)
    assert (pytester.path / "out" / "r.json").is_file()
    assert not (inner / "out").exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a_file/r.json", "cannot write *a_file*r.json: "),
        ("a_folder", "a_folder is a folder; write a file's path"),
        ("", "is a folder; write a file's path"),
    ],
    ids=["below-a-file", "folder", "empty"],
)
def test_path_that_cannot_be_written_is_refused_before_any_test(
    scripted, pytester, path, message, worker
):
    """A path that cannot be written is refused before any test and not after all of them."""
    (pytester.path / "a_file").touch()
    pytester.mkdir("a_folder")
    run = scripted(SOURCE, f"--cka-memory-json={path}", *worker, writes_json=False)
    run.assert_refused("--cka-memory-json: ")
    lines = [*run.result.outlines, *run.result.errlines]
    pytest.LineMatcher(lines).fnmatch_lines([f"*{message}*"])
    assert "test_leaks" not in run.text


def test_path_that_becomes_unwritable_fails_the_session(scripted, pytester):
    """A session whose report could not be written must not pass."""
    source = """
        import pathlib
        def test_it(cka_memory):
            pathlib.Path("out").rmdir()
            pathlib.Path("out").touch()
        """
    run = scripted(source, "--cka-memory-json=out/r.json", writes_json=False)
    assert run.result.ret == pytest.ExitCode.TESTS_FAILED
    run.result.stdout.fnmatch_lines(["FAILED: cannot write *r.json: *"])
    assert "figures written" not in run.text


def test_old_report_is_kept_until_the_new_one_is_complete(scripted, pytester):
    """A usage error keeps the old report, and no temporary file is left after a new one."""
    old = pytester.path / "old.json"
    old.write_text("old")
    options = [f"--cka-memory-json={old}", "--cka-memory-device=cpu"]
    run = scripted(
        "import pytest\n@pytest.mark.max_peak_mb(-1)\ndef test_it(): pass",
        *options,
        writes_json=False,
    )
    assert run.result.ret == pytest.ExitCode.USAGE_ERROR
    assert old.read_text() == "old"
    scripted("def test_it(cka_memory): pass", *options, writes_json=False)
    assert json.loads(old.read_text("utf-8"))["regions"]
    assert [path.name for path in pytester.path.iterdir() if "old.json" in path.name] == [
        "old.json"
    ]


def test_region_has_the_outcome_of_its_test(scripted):
    """A region has its test's outcome as in pytest: an error in
    teardown overrides a passed call.
    """
    run = scripted(
        """
        import pytest

        def test_passed(cka_memory): pass
        def test_failed(cka_memory): assert 0
        def test_skipped(cka_memory): pytest.skip()
        @pytest.mark.xfail
        def test_xfailed(cka_memory): assert 0
        @pytest.mark.xfail
        def test_xpassed(cka_memory): pass
        @pytest.fixture
        def broken():
            yield
            raise ValueError
        def test_error(broken, cka_memory): pass
        """
    )
    for region in run.regions:
        assert f"test_{region['outcome']}" in region["nodeid"]
    assert len(run.regions) == 6


def test_file_names_that_are_not_utf8_are_escaped(tmp_path):
    """A file name that is not UTF-8 is escaped, and JSON readers decode the original."""
    path = tmp_path / "r.json"
    name = "test_\udcff.py"  # Python decodes the name "test_\xff.py" to this
    files.write_whole(path, json.dumps({"nodeid": name}, ensure_ascii=False))
    assert json.loads(path.read_text("utf-8")) == {"nodeid": name}
    assert list(tmp_path.iterdir()) == [path]
