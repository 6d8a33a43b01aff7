"""Programs whose recordings are beside them: what is compared, and how programs are prepared."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MB = 2**20


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that compares programs with recordings."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "real_cards"))
    import recorded

    return recorded


def requests(recorded: ModuleType, events: list[Any], **others: Any) -> Any:
    """Return requests, whose reserve grows with each."""
    given = {
        "reserves": [2 * MB] * len(events),
        "start_reserved_bytes": 0,
        "start_blocks": Counter(),
        "reserved_bytes": 2 * MB,
        "used_bytes": 1024,
        "requested_bytes": 1024,
    }
    return recorded.Requests(events, **{**given, **others})


def test_every_program_is_named_once_and_has_a_known_card(recorded: ModuleType) -> None:
    """Names are the keys of the results, and each result is one of a program."""
    from emulated_cuda.cards import CARDS

    names = [program.name for program in recorded.PROGRAMS]
    assert len(set(names)) == len(names)
    for program in recorded.PROGRAMS:
        assert program.card in CARDS
        assert program.repository.count("/") == 1
        assert program.recording.endswith(".pickle")
    rows = json.loads(recorded.RESULTS.read_text("utf-8"))
    assert {row["program"] for row in rows} <= set(names)


def test_equal_requests_are_equal_to_the_last(recorded: ModuleType) -> None:
    """Each request and free counts, and the reserve after each."""
    events = [("request", 512, 0), ("request", 1000, 0), ("free", 512, 2)]
    row = recorded.compared(requests(recorded, events), requests(recorded, events))
    assert (row["equal_events"], row["events"], row["differences"]) == (3, 3, [])
    assert row["equal_but_for_order_of_frees"]
    assert row["equal_reserves"] == 3


def test_request_that_only_the_card_had_is_found_where_it_was(recorded: ModuleType) -> None:
    """A workspace that is missing is one difference, not one of all later requests."""
    before, after = ("request", 512, 0), ("request", 1000, 0)
    card = requests(recorded, [before, ("request", 8 * MB, 0), after])
    row = recorded.compared(card, requests(recorded, [before, after]))
    assert row["equal_events"] == 1
    assert not row["equal_but_for_order_of_frees"]
    assert row["differences"] == [{"at": 1, "card": [("request", 8 * MB)], "here": []}]


def test_order_of_frees_that_follow_each_other_is_told_apart_from_what_is_freed(
    recorded: ModuleType,
) -> None:
    """The same blocks freed in another order are equal but for that; another block is not."""
    asked = [("request", 512, 0), ("request", 512, 0), ("request", 512, 0)]
    first, second = ("free", 512, 3), ("free", 512, 3)
    forth = requests(recorded, [*asked, first, second])  # of requests 0 and 1
    back = requests(recorded, [*asked, ("free", 512, 2), ("free", 512, 4)])  # of 1 and 0
    other = requests(recorded, [*asked, first, ("free", 512, 2)])  # of 0 and 2
    assert recorded.compared(forth, back)["equal_but_for_order_of_frees"]
    assert recorded.compared(forth, back)["equal_events"] == 3
    assert not recorded.compared(forth, other)["equal_but_for_order_of_frees"]


def test_blocks_from_before_the_recording_are_compared(recorded: ModuleType) -> None:
    """What only one of them had when the recording began is listed by size."""
    card = requests(recorded, [], start_blocks=Counter({512: 2, 1024: 1}))
    row = recorded.compared(card, requests(recorded, [], start_blocks=Counter({512: 1, 2048: 1})))
    assert row["start_blocks_only_on_card"] == [512, 1024]
    assert row["start_blocks_only_here"] == [2048]


def test_recording_is_read_as_requests_with_the_blocks_that_they_free(
    recorded: ModuleType, tmp_path: Path
) -> None:
    """A free names the request of its block; a block that is not split counts whole."""

    def event(action: str, address: int, size: int) -> dict[str, Any]:
        return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}

    base = 2**30
    trace = [
        event("segment_alloc", base, 2 * MB),
        event("alloc", base, 1000),
        event("alloc", base + 1024, 512),
        event("free_requested", base, 1000),
        event("free_completed", base, 1000),
    ]
    blocks = [
        {"address": base, "size": 1024, "requested_size": 0, "state": "inactive"},
        {
            "address": base + 1024,
            "size": 1024,
            "requested_size": 512,
            "state": "active_allocated",
        },
        {
            "address": base + 2048,
            "size": 2 * MB - 2048,
            "requested_size": 0,
            "state": "inactive",
        },
    ]
    segment = {
        "device": 0,
        "address": base,
        "total_size": 2 * MB,
        "stream": 0,
        "segment_type": "small",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "blocks": blocks,
    }
    path = tmp_path / "one.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [trace], "segments": [segment]}))
    found = recorded.requests_of(path)
    assert found.events == [("request", 1000, 0), ("request", 512, 0), ("free", 1000, 2)]
    assert found.reserves == [2 * MB] * 3
    assert found.start_reserved_bytes == 0
    assert (found.reserved_bytes, found.peak_reserved_bytes) == (2 * MB, 2 * MB)
    assert (found.used_bytes, found.requested_bytes) == (1024, 512)


def test_program_is_taken_from_its_commit_with_its_edits(
    recorded: ModuleType, tmp_path: Path
) -> None:
    """Python files of the commit are written; a text to replace that is missing is an error."""
    source, target = tmp_path / "somebody+programs", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    (source / "train.py").write_text("size = 1\n")
    (source / "data.bin").write_text("large")
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    given = {"name": "p", "repository": "somebody/programs", "commit": "HEAD"}
    given |= {"recording": "r.pickle", "script": "train.py", "arguments": (), "card": "t4"}
    program = recorded.Program(**given, edits=(("train.py", "size = 1", "size = 2"),))
    directory = recorded.git_directory(tmp_path, program.repository)
    recorded.extract(program, directory, target)
    assert (target / "train.py").read_text() == "size = 2\n"
    assert not (target / "data.bin").exists()
    wrong = recorded.Program(**given, edits=(("train.py", "no such text", ""),))
    with pytest.raises(SystemExit, match=r"train\.py does not have 'no such text'"):
        recorded.extract(wrong, directory, target)
    with pytest.raises(SystemExit, match=r"expected else\+where\.git"):
        recorded.git_directory(tmp_path, "else/where")


def test_segments_are_moved_with_all_that_is_in_them(recorded: ModuleType, tmp_path: Path) -> None:
    """In descending order the last segment comes first; blocks and events move along."""
    import address_orders

    forth, back, *others = address_orders.orders(5, 4)
    assert (forth, back) == ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0])
    assert all(sorted(order) == forth != order for order in others)
    base = 2**30
    rows = [("segment_alloc", base, 20 * MB), ("segment_alloc", base + 20 * MB, 2 * MB)]
    rows += [("alloc", base + 512, 4 * MB), ("alloc", base + 20 * MB, 512)]
    trace = [
        {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}
        for action, address, size in rows
    ]
    segments = [
        {
            "device": 0,
            "address": address,
            "total_size": size,
            "stream": 0,
            "segment_type": kind,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "blocks": [
                {"address": address, "size": size, "requested_size": 0, "state": "inactive"}
            ],
        }
        for address, size, kind in ((base, 20 * MB, "large"), (base + 20 * MB, 2 * MB, "small"))
    ]
    path = tmp_path / "one.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [trace], "segments": segments}))
    (device,) = recorded.read(path).devices
    address_orders.move(device, [1, 0])
    assert [segment.address for segment in device.segments] == [base + 2 * MB, base]
    assert [segment.blocks[0].address for segment in device.segments] == [base + 2 * MB, base]
    assert list(device.addresses) == [base + 2 * MB, base, base + 2 * MB + 512, base]


@pytest.mark.slow
@pytest.mark.emulates
def test_program_runs_until_the_recording_that_is_wanted(tmp_path: Path) -> None:
    """The second recording is kept, weights get no values, and the rest does not run."""
    (tmp_path / "train.py").write_text(
        """
import torch
weight = torch.nn.init.normal_(torch.zeros(4))
assert weight.sum() == 0
for size in (1, 2, 3):
    assert size < 3, "it runs on"
    torch.cuda.memory._record_memory_history()
    kept = torch.empty(size * 1000, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._dump_snapshot("unwanted.pickle")
"""
    )
    into = tmp_path / "kept.pickle"
    one = str(BENCHMARKS / "real_cards" / "recorded_one.py")
    command = [sys.executable, "-W", "ignore", "-m", "emulated_cuda", "--no-values"]
    done = subprocess.run(
        [*command, one, str(into), "2", str(tmp_path), "train.py"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "unwanted.pickle").exists()
    found = pickle.loads(into.read_bytes())
    sizes = [e["size"] for e in found["device_traces"][0] if e["action"] == "alloc"]
    assert 2000 in sizes
    assert 3000 not in sizes
