"""Events that come as late as the host's waits allow, and the reserve that follows from it."""

import json

import pytest

from emulated_cuda import running
from emulated_cuda.cards import CARDS
from emulated_cuda.loading.records import DeviceUse, ProcessUse, with_late_reserves

ON_TWO_STREAMS = """
import torch

side = torch.cuda.Stream()
kept = torch.zeros(2**20, device="cuda")
for step in range(20):
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        block.add_(1)
    block.record_stream(side)
    del block
    if step % 5 == 4:
        WAIT
"""
QUESTIONS = """
import torch

main, side = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.zeros(8, device="cuda")

def behind_work(stream):
    with torch.cuda.stream(stream):
        x.add_(1)
    return stream.record_event()

answers = {}
event = behind_work(side)
answers["before"] = event.query()
main.synchronize()
answers["after a wait for another stream"] = event.query()
main.wait_stream(side)
main.synchronize()
answers["after a wait for a stream that waited"] = event.query()
event = behind_work(side)
event.synchronize()
answers["after its own wait"] = event.query()
event = behind_work(side)
torch.cuda.synchronize()
answers["after a wait for the device"] = event.query()
answers["behind nothing new"] = side.record_event().query()
event = behind_work(side)
for _ in range(1024):
    behind_work(side)
answers["after 1,024 launches"] = event.query()
event = behind_work(side)
asked = 1
while not event.query():
    asked += 1
answers["questions"] = asked
import json
print(json.dumps(answers))
"""


@pytest.fixture
def emulated(python, tmp_path):
    """Return a function that runs a program by ``python -m emulated_cuda``."""

    def run(source: str, *options: str):
        script = tmp_path / "program.py"
        script.write_text(source, encoding="utf-8")
        words = "-m", "emulated_cuda", "--no-values", *options, str(script)
        return python(*words, forked_children=True)

    return run


def test_event_is_done_when_the_host_must_know_it(emulated):
    """Its own wait, one behind it, one for the device, or 1,024 launches since."""
    answers = json.loads(emulated(QUESTIONS, "--late-events").stdout)

    assert answers == {
        "before": False,
        "after a wait for another stream": False,
        "after a wait for a stream that waited": True,
        "after its own wait": True,
        "after a wait for the device": True,
        "behind nothing new": True,
        "after 1,024 launches": True,
        "questions": 4096,
    }


def test_event_is_done_at_once_without_the_option(emulated):
    """By default work is done when it is given."""
    answers = json.loads(emulated(QUESTIONS).stdout)

    assert answers.pop("questions") == 1
    assert all(answers.values())


@pytest.mark.parametrize(
    ("wait", "upper_mb"),
    [
        # 20 MB for what is small, and the blocks that are not back before the host waits.
        pytest.param("torch.cuda.synchronize()", 20 + 5 * 64, id="waits"),
        pytest.param("pass", 20 + 20 * 64, id="never-waits"),
    ],
)
def test_range_is_shown_if_blocks_of_side_streams_may_be_late(emulated, tmp_path, wait, upper_mb):
    """The second run has all blocks that were freed since the host waited."""
    path = tmp_path / "used.json"
    run = emulated(ON_TWO_STREAMS.replace("WAIT", wait), "--reserve-range", "--json", str(path))

    (row,) = json.loads(path.read_text(encoding="utf-8"))
    assert row["max_reserved_bytes"] == 84 * 2**20
    assert row["late_reserved_bytes"] == upper_mb * 2**20
    assert (
        "on cuda:0 the reserved memory depends on how early the card finishes the work of its "
        f"streams: at least 84.0 MB, expected 84.0 MB, at most {upper_mb:,}.0 MB"
    ) in run.stderr


def test_range_is_not_shown_for_one_stream(emulated):
    """A block of the stream that frees it is free at once, whenever its work is done."""
    source = "import torch\nfor _ in range(9): torch.empty(2**25, device='cuda')"
    assert "depends on" not in emulated(source, "--reserve-range").stderr


@pytest.mark.parametrize(
    ("late", "is_shown"),
    [
        pytest.param(101, False, id="equal-to-one-percent"),
        pytest.param(102, True, id="above"),
        pytest.param(98, True, id="below"),
        pytest.param(None, False, id="not-run"),
    ],
)
def test_range_is_shown_above_one_percent(late, is_shown):
    """A smaller difference is no news."""
    device = DeviceUse(0, 100, 0, 90, False, late_reserved_bytes=late)
    process = ProcessUse(1, "x.py", None, CARDS["t4"], CARDS["t4"].total_bytes, True, (device,))

    found = [line for line in running.lines([process]) if "depends on" in line]

    assert bool(found) is is_shown


def test_processes_are_matched_by_rank_and_program():
    """Ranks may end in another order, and a process may be missing."""

    def process(rank: int | None, program: str, reserved: int) -> ProcessUse:
        device = DeviceUse(0, reserved, 0, None, None)
        return ProcessUse(1, program, rank, CARDS["t4"], 2**34, True, (device,))

    found = with_late_reserves(
        [process(0, "a.py", 1), process(1, "a.py", 2), process(None, "b.py", 3)],
        [process(1, "a.py", 20), process(0, "a.py", 10)],
    )

    assert [each.devices[0].late_reserved_bytes for each in found] == [10, 20, None]
