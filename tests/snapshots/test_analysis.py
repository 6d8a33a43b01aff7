"""What a recording says, on recordings of a few events whose figures are known."""

import json

import made
import pytest

from pytest_cka_memory.cli.main import OK, main
from pytest_cka_memory.core.memory_timeline import RecordedBlock
from pytest_cka_memory.snapshots.analysis import BEFORE, NO_STACK, Levels, Lines, analysed, kinds
from pytest_cka_memory.snapshots.reading import read, recorded_settings, rounding

MB = made.MB


@pytest.fixture
def analysis(tmp_path):
    """Return a function that reads made data: the snapshot and what its only device did."""

    def of(data):
        snapshot = read(made.written(tmp_path, data))
        (device,) = snapshot.devices
        return snapshot, analysed(snapshot, device)

    return of


def test_peak_and_reserve_are_those_of_the_events(analysis):
    """The highest level, its moment, and the reserve then and at the end."""
    _, found = analysis(made.two_allocations())
    assert found.peak == (3, 2, 0.003, 30 * MB, 30 * MB)
    assert found.reserved_peak == (2, 1, 0.0, 20 * MB, 30 * MB)
    assert found.end == (5, 3, 0.005, 20 * MB, 30 * MB)
    assert (found.steps, found.allocations, found.seconds) == (3, 2, 0.005)


@pytest.mark.parametrize(
    ("moments", "highest"),
    [
        pytest.param([0, 1, 2, 3, 4, 5], [5, 9, 9, 4, 4, 4], id="each"),
        pytest.param([0, 2, 4], [9, 9, 4], id="a-peak-between"),
        pytest.param([0], [9], id="one"),
    ],
)
def test_reserve_over_time_is_the_highest_until_the_next_moment(moments, highest):
    """The line of a page with few moments leaves out no peak of the reserve."""
    levels = Levels(5)
    for step, level in ((1, 7), (1, 9), (2, 4)):
        levels.add(step, level)
    assert levels.highest(moments) == highest


def test_lines_have_their_bytes_blocks_callers_and_kinds(analysis):
    """A line of a library is not shown if the program has one, and folders of a user neither."""
    snapshot, found = analysis(made.two_allocations())
    live = found.live(found.peak)
    first, second = Lines(snapshot).grouped(live)
    assert first == (
        *("model.py:11 in forward", ("train.py:30 in main",), "activations", 20 * MB, 1, 0),
    )
    assert second == ("train.py:33 in main", (), "optimiser", 10 * MB, 1, 0)
    assert kinds(snapshot, live) == [("activations", 20 * MB), ("optimiser", 10 * MB)]
    assert [row.line for row in Lines(snapshot).grouped(found.live(found.end))] == [first.line]


def test_line_that_several_others_called_says_how_many(analysis):
    """One caller of three is named; it has the largest part."""
    block = made.frame("/home/bob/p/net.py", 37, "forward")
    callers = [made.frame("/home/bob/p/net.py", line, "forward") for line in (56, 76, 76, 90)]
    events = [
        made.event("alloc", made.BASE + number * MB, (4 - number) * 512, [block, caller])
        for number, caller in enumerate(callers)
    ]
    snapshot, found = analysis(made.snapshot(events))
    (line,) = Lines(snapshot).grouped(found.live(found.peak))
    assert (line.blocks, line.callers[0], line.other_callers) == (4, "net.py:76 in forward", 2)


def test_full_paths_are_those_of_the_file(analysis):
    """On request, paths are as the file has them."""
    snapshot, found = analysis(made.two_allocations())
    lines = Lines(snapshot, full_paths=True).grouped(found.live(found.peak))
    assert lines[0].line == "/home/alice/projects/net/model.py:11 in forward"


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        pytest.param(["/home/bob/a.py"], "a.py", id="one file"),
        pytest.param(["/home/bob/x/a.py", "/home/bob/x/y/b.py"], "a.py", id="folder"),
        pytest.param(["/home/bob/a.py", "/opt/b.py"], "a.py", id="nothing shared"),
        pytest.param(["C:\\Users\\bob\\a.py"], "a.py", id="windows"),
        pytest.param(["/tmp/ipykernel_77/123.py"], "notebook cell", id="notebook"),
        pytest.param(
            ["/v/site-packages/transformers/models/llama.py"],
            "transformers/models/llama.py",
            id="library",
        ),
    ],
)
def test_paths_begin_where_the_program_does(analysis, files, shown):
    """What is before the folder of the program, such as the name of a user, is left out."""
    events = [
        made.event("alloc", made.BASE + n * 512, 512, [made.frame(file, 1, "f")])
        for n, file in enumerate(files)
    ]
    snapshot, _ = analysis(made.snapshot(events))
    assert Lines(snapshot).text(1)[0] == f"{shown}:1 in f"


def test_what_is_older_than_the_recording_is_in_use_from_its_begin(analysis):
    """A block that the recording only frees was in use before, as was one that is never freed."""
    base = made.BASE
    events = [made.event("free_completed", base, 4 * MB)]
    kept = made.block(base + 4 * MB, 16 * MB, frames=made.TRAIN)
    freed = made.block(base, 4 * MB, requested=0, state="inactive")
    snapshot, found = analysis(made.snapshot(events, [made.segment(base, 20 * MB, [freed, kept])]))
    assert found.beginning.reserved_bytes == 20 * MB
    assert found.peak == (-1, 0, None, 20 * MB, 20 * MB)
    rows = Lines(snapshot).grouped(found.live(found.peak))
    assert [(row.line, row.bytes) for row in rows] == [
        ("model.py:11 in forward", 16 * MB),
        (BEFORE, 4 * MB),
    ]
    assert list(found.recorded_blocks()) == [RecordedBlock(4 * MB, 0, 1, -1, 1, False, 0)]


def test_events_without_stacks_are_one_line(analysis):
    """A recording without stacks still has its levels."""
    snapshot, found = analysis(made.snapshot([made.event("alloc", made.BASE, 512)]))
    assert Lines(snapshot).grouped(found.live(found.end))[0].line == NO_STACK


def test_refused_allocation_has_its_request_and_what_was_free(analysis):
    """An out-of-memory event has what was asked for, by which line, and what the card had left."""
    data = made.two_allocations()
    data["device_traces"][0].append(made.event("oom", 7 * MB, 50 * MB, made.TRAIN, time=9000))
    _, found = analysis(data)
    (refusal,) = found.refusals
    assert (refusal.requested_bytes, refusal.free_bytes) == (50 * MB, 7 * MB)
    assert refusal.moment == (6, 3, 0.009, 20 * MB, 30 * MB)


@pytest.mark.parametrize(
    ("size", "division", "expected"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200 * 512, 4, 1280 * 512),  # between 1024 and 2048 in steps of 256
        (1280 * 512, 4, 1280 * 512),
        (2047 * 512, 4, 2048 * 512),
        (2048, 4, 2048),
        (1000, 4, 1024),
    ],
)
def test_requests_are_rounded_as_the_allocator_does(size, division, expected):
    """Sizes of blocks under roundup_power2_divisions, from the allocator's documentation."""
    table = {str(2**n): division for n in range(16)}
    assert rounding({"roundup_power2_divisions": table})(size) == expected


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({}, ""),
        ({"max_split_size": -1, "expandable_segments": False}, ""),
        ({"expandable_segments": True}, "expandable_segments:True"),
        ({"max_split_size": 128 * MB}, "max_split_size_mb:128"),
        ({"garbage_collection_threshold": 0.6}, "garbage_collection_threshold:0.6"),
        (
            {"roundup_power2_divisions": {str(2**n): 4 for n in range(16)}},
            "roundup_power2_divisions:4",
        ),
        (
            {"roundup_power2_divisions": {"1": 0, "2": 8}},
            "roundup_power2_divisions:[1:1,2:8]",
        ),
        ({"max_split_size": "x", "expandable_segments": 1}, ""),
    ],
)
def test_settings_are_written_as_the_variable_has_them(found, text):
    """The settings of a snapshot as a text of PYTORCH_ALLOC_CONF."""
    assert recorded_settings(found) == text


def test_command_prints_a_screenful(tmp_path, capsys):
    """One file: its levels, lines, kinds, end and reserve, in fewer than 40 lines."""
    path = made.written(tmp_path, made.two_allocations())
    assert main(["snapshot", str(path), "--json", str(tmp_path / "out.json")]) == OK
    text = capsys.readouterr().out
    assert "highest in use    30.0 MB at event 3 (0.00 s), with 30.0 MB reserved" in text
    assert "20.0 MB in 1 block  model.py:11 in forward, from train.py:30 in main" in text
    assert "activations 67 %, optimiser 33 %" in text
    assert "of 30.00 MB reserved, 20.00 MB in use, 10.00 MB free in whole segments" in text
    assert len(text.splitlines()) < 40
    (data,) = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert data["devices"][0]["peak"]["used_bytes"] == 30 * MB
    assert data["devices"][0]["peak"]["lines"][0]["bytes"] == 20 * MB


def test_two_files_differ_by_line(tmp_path, capsys):
    """Two files: what each line has more or less at the peak."""
    data = made.two_allocations()
    old = made.written(tmp_path, data, "old.pickle")
    events = data["device_traces"][0]
    events.insert(4, made.event("alloc", made.BASE + 40 * MB, 5 * MB, made.STEP))
    new = made.written(tmp_path, data, "new.pickle")
    assert main(["snapshot", str(old), str(new)]) == OK
    text = capsys.readouterr().out
    assert "cuda:0: +5.0 MB at the peak, +0.0 MB reserved, from old.pickle to new.pickle" in text
    assert "+5.0 MB, now 15.0 MB  train.py:33 in main" in text


def test_devices_are_side_by_side(tmp_path, capsys):
    """A file of two devices has a row for each, and the one with most in use is explained."""
    data = made.two_allocations()
    data["device_traces"].append([made.event("alloc", made.BASE, 64 * MB, made.STEP)])
    path = made.written(tmp_path, data)
    assert main(["snapshot", str(path)]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["made.pickle", "cuda:0", "6", "30.0"]
    assert lines[2].split()[:4] == ["made.pickle", "cuda:1", "1", "64.0"]
    assert lines[4].startswith("made.pickle, cuda:1")


def test_page_escapes_what_the_file_says(tmp_path):
    """A name in the file never becomes markup of the page, which loads nothing from elsewhere."""
    bad = "<script>alert(1)</script>"
    stack = [made.frame(f"/x/{bad}.py", 1, bad)]
    data = made.snapshot([made.event("alloc", made.BASE, MB, stack)])
    path, page = made.written(tmp_path, data), tmp_path / "page.html"
    assert main(["snapshot", str(path), "--html", str(page)]) == OK
    text = page.read_text("utf-8")
    assert bad not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "default-src 'none'" in text
    assert "src=" not in text


def test_page_has_the_timeline_and_the_segments(tmp_path):
    """The page draws the levels of each line and what is in use of each segment."""
    path, page = made.written(tmp_path, made.two_allocations()), tmp_path / "page.html"
    assert main(["snapshot", str(path), "--html", str(page)]) == OK
    text = page.read_text("utf-8")
    assert "<label>Device <select" in text
    assert ">Whole recording</button>" in text
    assert "region" not in text.partition("<form id")[2].partition("</form>")[0].replace(
        'id="tl-region"', ""
    )
    assert "At most 30.0 MB in use, 30.0 MB reserved".lower() in text.lower()
    assert "20.0 of 20.0 MB in use" in text
    assert "0.0 of 10.0 MB in use" in text
    assert '"peak":2' in text
    assert f'"reserve":[0,{20 * MB},1,{30 * MB}]' in text
    assert "before the recording" in text
    assert "before the region" not in text


def test_command_refuses_to_overwrite_its_input(tmp_path, capsys):
    """A page in the place of the recording would destroy it."""
    path = made.written(tmp_path, made.two_allocations())
    assert main(["snapshot", str(path), "--html", str(path)]) == 2
    assert "is the input file itself" in capsys.readouterr().err


def refused(in_use_mb, *, freed=True):
    """Return a recording: of 100 MB, so much was in use when 50 MB were refused."""
    a, b = made.BASE, made.BASE + 200 * MB
    events = [
        made.event("segment_alloc", a, in_use_mb * MB),
        made.event("alloc", a, in_use_mb * MB, made.TRAIN),
        made.event("segment_alloc", b, (100 - in_use_mb) * MB),
        made.event("alloc", b, (100 - in_use_mb) * MB, made.STEP),
        made.event("free_requested", b, (100 - in_use_mb) * MB),
        made.event("free_completed", b, (100 - in_use_mb) * MB),
        made.event("oom", 10 * MB, 50 * MB, made.TRAIN),
    ]
    if freed:
        events.append(made.event("free_requested", a, in_use_mb * MB))
        events.append(made.event("free_completed", a, in_use_mb * MB))
    state = "inactive" if freed else "active_allocated"
    segments = [
        made.segment(a, in_use_mb * MB, [made.block(a, in_use_mb * MB, state=state)]),
        made.segment(
            b, (100 - in_use_mb) * MB, [made.block(b, (100 - in_use_mb) * MB, state="inactive")]
        ),
    ]
    return made.snapshot(events, segments)


@pytest.mark.parametrize("freed", [True, False])
@pytest.mark.parametrize(("in_use_mb", "share"), [(99, None), (60, 40)])
def test_advice_on_the_reserve_is_about_when_memory_was_refused(
    tmp_path, capsys, in_use_mb, share, freed
):
    """What an error has freed until the end did not fill the card, and is no reason for advice."""
    path = made.written(tmp_path, refused(in_use_mb, freed=freed))
    page = tmp_path / "page.html"
    assert main(["snapshot", str(path), "--html", str(page)]) == OK
    printed = capsys.readouterr().out
    assert "the reserve when memory was refused:" in printed
    assert f"of 100.00 MB reserved, {in_use_mb}.00 MB in use" in printed
    text = f"hat to do about the {share} % that are not in use" if share else "hat to do about"
    for written in (printed, page.read_text("utf-8")):
        assert (text in written) == (share is not None)


@pytest.mark.parametrize(
    ("origin", "shown"),
    [
        ({}, "CARD SCRIPT.py, or a test instead of the script"),
        ({"card": "t4", "program": ""}, "t4 SCRIPT.py, or a test instead of the script"),
        ({"card": "t4", "program": "a.py 'b c'", "usable_mb": "1536"}, "t4 --to=1536 a.py 'b c'"),
        ({"card": "; rm", "program": "a.py; rm -r ."}, "CARD SCRIPT.py, or a test instead"),
        ({"card": "t4", "program": "a.py $(rm -r .)\n"}, "t4 a.py '$(rm' -r '.)'"),
        ({"card": "t4", "program": "a.py 'open"}, "t4 SCRIPT.py, or a test instead of the script"),
    ],
)
def test_command_of_a_file_is_one_command(tmp_path, capsys, origin, shown):
    """It names what the file knows; a file that others wrote cannot put in a second command."""
    path = made.written(tmp_path, {**made.two_allocations(), "emulated_cuda": origin})
    assert main(["snapshot", str(path)]) == OK
    assert f"pytest_cka_memory repair --card {shown}" in capsys.readouterr().out
