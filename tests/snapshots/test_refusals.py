"""A measured test that runs out of memory leaves a file of what was live, and only then."""

import os
import pickle
import re

import forked_processes
import pytest

from pytest_cka_memory.snapshots.analysis import Lines, analysed
from pytest_cka_memory.snapshots.reading import read

pytestmark = [pytest.mark.slow, pytest.mark.emulates]

MB = 2**20
TESTS = """
import pytest
import torch

MB = 2**20
KEPT = []


def block(mb):
    return torch.empty(mb * MB, dtype=torch.uint8, device="cuda")


@pytest.fixture(autouse=True)
def nothing_left():
    KEPT.clear()
    torch.cuda.empty_cache()


@pytest.fixture
def model():
    return torch.nn.Linear(4096, 4096, device="cuda")


def test_runs_out(cka_memory, model):
    batch = torch.zeros(100_000, 4096, device="cuda")
    while True:
        KEPT.append(model(batch))


def test_in_pieces(cka_memory):
    others = []
    for number in range(3400):
        (others if number % 5 else KEPT).append(block(4))
    del others
    block(8000)


def test_twice(cka_memory):
    with pytest.raises(torch.OutOfMemoryError):
        block(90_000)
    block(80_000)


def test_wrapped(cka_memory):
    try:
        block(70_000)
    except torch.OutOfMemoryError as error:
        raise ValueError("batches are too large") from error


def test_search(cka_memory):
    for mb in (60_000, 50_000, 10):
        try:
            block(mb)
            break
        except torch.OutOfMemoryError:
            pass


def test_search_that_fails_later(cka_memory):
    with pytest.raises(torch.OutOfMemoryError):
        block(60_000)
    raise ValueError("for another reason")


@pytest.mark.xfail
def test_expected(cka_memory):
    block(60_000)


def test_not_measured():
    block(60_000)
"""
FILE = re.compile(
    r"^(\S+\.pickle): the memory that was live when an allocation was refused$", re.MULTILINE
)


def run(folder, *words):
    (folder / "test_it.py").write_text(TESTS, encoding="utf-8")
    device = "--cka-memory-device=emulate:cuda:t4,values=off"
    done = forked_processes.run(
        ["pytest", "-q", "-p", "no:randomly", device, *words, "test_it.py"],
        folder=folder,
        environment={**os.environ, "COLUMNS": "200"},
    )
    return done.stdout


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """Run the tests on an emulated card without any report; the folder and what was printed."""
    folder = tmp_path_factory.mktemp("session")
    return folder, run(folder)


@pytest.fixture
def found(session):
    """Return a function that reads the file of a test."""

    def found(name):
        (path,) = files(session[0], f"_{name}-")
        snapshot = read(path)
        return path, snapshot, analysed(snapshot, snapshot.devices[0])

    return found


def files(folder, part=""):
    """Return the files below a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*.pickle*") if part in path.name)


def command(session, *words):
    """Return what a command prints in the folder of the session."""
    return forked_processes.run(
        ["python", "-m", "pytest_cka_memory", *words], folder=session[0]
    ).stdout


def test_only_tests_that_memory_has_ended_leave_a_file(session):
    """A program that handles the error, such as a search, leaves nothing on the disk."""
    folder, _ = session
    names = [re.search("_(test_.*)-", path.name)[1] for path in files(folder)]
    assert names == ["test_in_pieces", "test_runs_out", "test_twice", "test_wrapped"]


def test_files_are_in_the_cache_of_pytest(session):
    """Without a report they are where version control does not look."""
    folder, _ = session
    cache = folder / ".pytest_cache"
    assert {path.parent for path in files(folder)} == {cache / "d" / "cka-memory-snapshots"}
    assert (cache / ".gitignore").read_text("utf-8").endswith("*\n")


def test_message_ends_with_the_two_commands(session):
    """The commands name the file as it is typed in the folder of the session."""
    _, output = session
    paths = FILE.findall(output)
    assert len(paths) == 4
    for path in paths:
        section = output.partition(f"{path}: the memory that was live")[2].split("\n")
        assert "run pytest with --cka-memory-snapshots=FOLDER" in section[1]
        assert section[2:4] == [
            f"python -m pytest_cka_memory snapshot {path}",
            f"python -m pytest_cka_memory replay {path}",
        ]


def test_file_has_what_was_live_by_line_and_kind(session, found):
    """Lines are those of the counter, because torch has no stacks without a recording."""
    path, snapshot, analysis = found("test_runs_out")
    rows = {row.line: row for row in Lines(snapshot).grouped(analysis.live(analysis.end))}
    outputs, batch = rows["test_it.py:27 in test_runs_out"], rows["test_it.py:25 in test_runs_out"]
    assert outputs.bytes // (100_000 * 4096 * 4) == 8  # and a workspace of cuBLAS
    assert outputs.kind == "activations"
    assert (batch.bytes, batch.blocks, batch.kind) == (100_000 * 4096 * 4, 1, "other")
    (refusal,) = analysis.refusals
    assert Lines(snapshot).text(refusal.site)[0] == "test_it.py:27 in test_runs_out"
    # The allocator asks the card for whole segments of 2 MB.
    assert 0 <= refusal.requested_bytes - 100_000 * 4096 * 4 < 2 * MB
    assert refusal.free_bytes < refusal.requested_bytes
    printed = command(session, "snapshot", str(path))
    assert "memory that was live when an allocation was refused; earlier events were" in printed
    assert "64.0 MB in 2 blocks  memory from before the test" in printed
    assert "run pytest with --cka-memory-snapshots=FOLDER, or write at" in printed
    assert "torch.cuda.memory._record_memory_history(" in printed


def test_page_says_that_nothing_before_was_recorded(session, found):
    """The page of such a file has its lines and segments, and no memory over time."""
    path, _, _ = found("test_runs_out")
    command(session, "snapshot", str(path), "--html", "page.html")
    page = (session[0] / "page.html").read_text("utf-8")
    assert "earlier events were not recorded" in page
    assert "test_it.py:27 in test_runs_out" in page
    assert "tl-plot" not in page.partition("<body")[2]


def test_last_refusal_remains(found):
    """Of several refusals of a test there is one file, with the last of them."""
    _, _, analysis = found("test_twice")
    assert [it.requested_bytes for it in analysis.refusals] == [80_000 * MB]


def test_replay_says_that_the_program_must_allocate_less(session, found):
    """What was live and what was refused are more than the card has: no setting helps."""
    path, _, _ = found("test_runs_out")
    printed = command(session, "replay", str(path))
    assert "so there is nothing to replay" in printed
    assert "no setting is enough: the " in printed
    assert "NVIDIA A100 80GB is large enough with any setting" in command(
        session, "replay", str(path), "--card", "a100"
    )


def test_replay_says_that_a_setting_may_be_enough(session, found):
    """If memory was in pieces, a setting may help, and it says how to record for that."""
    path, _, _ = found("test_in_pieces")
    printed = command(session, "replay", str(path))
    assert "a setting may be enough: the 2,720.0 MB in use and the 8,000.0 MB that were" in printed
    assert "10,880.0 MB of the reserved memory were free, but in pieces" in printed
    assert "run pytest with --cka-memory-snapshots=FOLDER" in printed


def test_workers_write_beside_the_report(tmp_path):
    """Under xdist each worker writes the files of its tests beside the session's report."""
    output = run(tmp_path, "-n", "2", "--cka-memory-json=out/report.json")
    assert {path.parent.name for path in files(tmp_path)} == {"out"}
    assert sorted(FILE.findall(output)) == [
        str(path.relative_to(tmp_path)) for path in files(tmp_path)
    ]
    assert len(files(tmp_path)) == 4


def test_option_records_instead(tmp_path):
    """With the option the file has all events of the test, and is written once at its end."""
    run(tmp_path, "--cka-memory-snapshots=kept", "-k", "test_in_pieces or test_search")
    found = files(tmp_path)
    assert [path.parent.name for path in found] == ["kept"] * 2
    snapshot = read(found[0])
    analysis = analysed(snapshot, snapshot.devices[0])
    assert analysis.allocations == 3400
    assert [it.requested_bytes for it in analysis.refusals] == [8000 * MB]


def test_session_without_a_cache_says_how_to_record(tmp_path):
    """If there is neither a report nor a cache, nothing is written, and the message says how."""
    output = run(tmp_path, "-p", "no:cacheprovider", "-k", "test_runs_out")
    assert files(tmp_path) == []
    assert "run pytest with --cka-memory-snapshots=FOLDER, then" in output
    assert "python -m pytest_cka_memory replay FILE" in output


def test_folder_that_cannot_be_written_is_said(tmp_path):
    """A file that cannot be written does not hide why the test failed."""
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    output = run(tmp_path, "-o", "cache_dir=cache", "-k", "test_runs_out")
    assert "torch.OutOfMemoryError" in output
    assert "no memory snapshot: cannot write" in output


def test_refusal_of_an_empty_card_names_no_kinds(tmp_path):
    """The first allocation of a program may be too large: then nothing was in use."""
    event = {"action": "oom", "device_free": 10 * MB, "size": 20 * MB, "stream": 0, "frames": []}
    traces = [[{**event, "time_us": 1}]]
    snapshot = {"segments": [], "device_traces": traces, "allocator_settings": {}}
    (tmp_path / "first.pickle").write_bytes(pickle.dumps(snapshot))
    printed = command((tmp_path,), "snapshot", "first.pickle")
    assert "20.0 MB were requested by" in printed
    assert "nothing was in use then" in printed
    assert "by kind" not in printed
