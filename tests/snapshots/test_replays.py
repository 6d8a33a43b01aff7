"""Recordings of programs, replayed: the reserve is the program's own, to the byte."""

import json
import os

import forked_processes
import made
import pytest
import torch
from recorded_programs import PROGRAMS

from emulated_cuda import replaying
from emulated_cuda.torch_versions import allocator_variable
from pytest_cka_memory.cli.main import OK, UNUSABLE, main
from pytest_cka_memory.snapshots import replays
from pytest_cka_memory.snapshots.beginning import beginning_of
from pytest_cka_memory.snapshots.reading import read, recorded_settings
from pytest_cka_memory.snapshots.replays import Run
from pytest_cka_memory.snapshots.request_list import requests_of

MB = made.MB
EXPANDABLE = "expandable_segments:True"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
OF_EACH_KIND = (
    *("gpt_of_changing_lengths", "cache_that_doubles", "graphs_that_are_deleted"),
    *("batches_on_a_side_stream", "layers_that_are_offloaded"),
)


@pytest.fixture(scope="module")
def by_setting(recorded):
    """Setting -> the recordings under it and the allocator's own figures."""
    return {setting: recorded(setting, *OF_EACH_KIND) for setting in ("", EXPANDABLE)}


def replayed(path, *runs):
    """Replay the only device of a recording; return its requests and the results."""
    snapshot = read(path)
    (device,) = snapshot.devices
    request_list = requests_of(snapshot, device)
    return device, request_list, replays.run(request_list, runs)


AS_RECORDED = {"attempts": False, "releases": True}


@pytest.mark.emulates
@pytest.mark.slow
@pytest.mark.usefixtures("forked_replays")
@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_replay_takes_what_the_program_takes_under_each_setting(by_setting, name):
    """A recording tells what the program takes under other settings, and under its own the reserve
    follows the recorded one from the first to the last event.
    """
    path, _ = by_setting[""][name]
    runs = [Run(setting) for setting in by_setting]
    device, request_list, results = replayed(path, Run("", **AS_RECORDED), *runs)
    found = replays.exactness(request_list, device, results[0])
    assert found.is_exact
    assert found.allocations > 30
    assert found.growths > 3
    for setting, result in zip(by_setting, results[1:], strict=True):
        own = by_setting[setting][name][1]
        assert result.error == ""
        assert result.allocated_bytes == own["allocated_bytes"]
        if device.names_pools or setting == "" or name != "graphs_that_are_deleted":
            assert result.reserved_bytes == own["reserved_bytes"]
        else:  # in the segments of its pool, such a graph would have left other gaps
            assert abs(result.reserved_bytes - own["reserved_bytes"]) <= 20 * MB


@pytest.mark.emulates
@pytest.mark.slow
@pytest.mark.usefixtures("forked_replays")
@pytest.mark.parametrize("name", ["graphs_that_are_deleted", "layers_that_are_offloaded"])
def test_reserve_of_expandable_segments_is_equal_after_each_allocation(by_setting, name):
    """Pages that are mapped and unmapped are followed as whole segments are."""
    path, _ = by_setting[EXPANDABLE][name]
    assert recorded_settings(read(path).settings) == EXPANDABLE
    device, request_list, (result,) = replayed(path, Run(EXPANDABLE, **AS_RECORDED))
    found = replays.exactness(request_list, device, result)
    assert found.is_exact
    assert found.growths > 3


@pytest.mark.emulates
@pytest.mark.usefixtures("forked_replays")
@pytest.mark.parametrize("kind", ["late", "wrapped"])
@pytest.mark.parametrize("setting", ["", EXPANDABLE], ids=["default", "expandable"])
def test_recording_that_begins_in_the_middle_begins_exactly(recorded, setting, kind):
    """The first segments and blocks are rebuilt, and the reserve is equal from there on."""
    for path, _ in recorded(setting, kind, *OF_EACH_KIND[1:3]).values():
        device, request_list, (result,) = replayed(path, Run(setting, **AS_RECORDED))
        found = replays.exactness(request_list, device, result)
        assert request_list.beginning.reserved_bytes > 0
        assert found.is_exact
        assert found.wrong_segments == 0


@pytest.mark.emulates
@pytest.mark.slow
def test_difference_is_counted(tmp_path):
    """A recording that no allocator would make: the replay says by how much it differs."""
    data = made.two_allocations()
    data["device_traces"][0][2]["size"] = 14 * MB  # for a block of 10 MB, it takes 10
    device, request_list, (result,) = replayed(made.written(tmp_path, data), Run(""))
    found = replays.exactness(request_list, device, result)
    assert not found.is_exact
    assert (found.differing, found.first_event, found.largest_bytes) == (1, 3, 4 * MB)
    assert (found.first_recorded_bytes, found.first_replayed_bytes) == (34 * MB, 30 * MB)


@pytest.mark.emulates
@pytest.mark.usefixtures("forked_replays")
@pytest.mark.parametrize("has_cause", [False, True])
def test_replay_that_differs_says_why(tmp_path, capsys, has_cause):
    """Another allocator is named; without a known cause there is no line."""
    file = "/venv/lib/python3.12/site-packages/torch_npu/utils/_module.py"
    data = made.two_allocations()
    event = data["device_traces"][0][2]
    event["size"] = 14 * MB
    data["device_traces"][0][1]["frames"] = [made.frame(file, 1, "to")] if has_cause else []
    path = made.written(tmp_path, data)
    assert main(["replay", str(path), "--try", EXPANDABLE]) == OK
    output = capsys.readouterr().out
    assert "the replayed reserve differs from the recorded one after 1 of 2 allocations" in output
    cause = (
        "cause: torch_npu wrote the recording on an Ascend NPU, and has another allocator than CUDA"
    )
    assert (cause in output) is has_cause
    assert ("cause: " in output) is (has_cause or TORCH == (2, 12))  # it takes the oldest block


@pytest.mark.parametrize("size", [2 * MB, 20 * MB, 22 * MB])
def test_empty_range_is_of_small_blocks_unless_it_has_large_pages(tmp_path, size):
    """No block tells for which blocks memory was mapped that was unmapped later."""
    data = made.snapshot([made.event("segment_unmap", made.BASE, size)])
    (device,) = read(made.written(tmp_path, data)).devices
    (segment,) = beginning_of(device).segments
    assert (segment.bytes, segment.is_small) == (size, size != 20 * MB)
    assert segment.is_expandable


@pytest.mark.emulates
@pytest.mark.slow
def test_events_name_their_pools_since_torch_2_12(by_setting):
    """Before, the pool of a graph that was deleted is not known."""
    (device,) = read(by_setting[""]["graphs_that_are_deleted"][0]).devices
    assert device.names_pools is (TORCH >= (2, 12))


def test_beginning_is_computed_backwards(tmp_path):
    """Freed segments and blocks are there again, and those that came later are not."""
    base = made.BASE
    events = [
        made.event("free_completed", base, 3 * MB),
        made.event("segment_free", base, 20 * MB),
        made.event("segment_alloc", base + 64 * MB, 12 * MB),
        made.event("alloc", base + 64 * MB, 12 * MB),
    ]
    segments = [made.segment(base + 64 * MB, 12 * MB, [made.block(base + 64 * MB, 12 * MB)])]
    (device,) = read(made.written(tmp_path, made.snapshot(events, segments))).devices
    found = beginning_of(device)
    assert (found.reserved_bytes, found.used_bytes, found.lost_blocks) == (20 * MB, 3 * MB, 0)
    (segment,) = found.segments
    assert (segment.address, segment.bytes, segment.is_small) == (base, 20 * MB, False)
    assert [block[:3] for block in segment.blocks] == [(base, 3 * MB, 3 * MB)]


def test_gap_of_a_megabyte_belongs_to_a_large_block(tmp_path):
    """The allocator does not split off 1 MB or less of a large block, and splits off more."""
    base = made.BASE
    events = [
        made.event("free_completed", base, 3 * MB),
        made.event("free_completed", base + 4 * MB, 10 * MB),
    ]
    rest = made.block(base, 20 * MB, requested=0, state="inactive")
    data = made.snapshot(events, [made.segment(base, 20 * MB, [rest])])
    (device,) = read(made.written(tmp_path, data)).devices
    (segment,) = beginning_of(device).segments
    assert [block.bytes for block in segment.blocks] == [4 * MB, 10 * MB]


@pytest.mark.parametrize(
    ("frames", "following", "action"),
    [
        pytest.param(made.EMPTY, "segment_alloc", replaying.EMPTY_CACHE, id="call"),
        pytest.param(made.TRAIN, "segment_alloc", replaying.RELEASE, id="full card"),
        pytest.param((), "segment_alloc", replaying.RELEASE, id="no stack, then a new segment"),
        pytest.param((), "alloc", replaying.EMPTY_CACHE, id="no stack, no new segment"),
    ],
)
def test_released_segments_are_a_call_or_the_allocators_own(tmp_path, frames, following, action):
    """The stack tells who has released the cache; without one, what comes next does."""
    base = made.BASE
    events = [
        made.event("segment_free", base, 20 * MB, frames),
        made.event(following, base + 64 * MB, 20 * MB),
    ]
    snapshot = read(made.written(tmp_path, made.snapshot(events)))
    request_list = requests_of(snapshot, snapshot.devices[0])
    made_of_events = [*request_list.actions[request_list.first :]]
    assert made_of_events[0] == action
    assert request_list.releases == (action == replaying.RELEASE)
    assert request_list.unclear_releases == (action == replaying.RELEASE and not frames)


@pytest.mark.emulates
@pytest.mark.slow
@pytest.mark.usefixtures("forked_replays")
def test_command_prints_what_fits(by_setting, tmp_path, capsys):
    """The table has each setting, whether it fits the card, and what to write."""
    path, own = by_setting[""]["cache_that_doubles"]
    needed = by_setting[EXPANDABLE]["cache_that_doubles"][1]["reserved_bytes"]
    size = f"{needed // MB + 512 + 100} MB"
    words = ["replay", str(path), "--memory", size, "--try", EXPANDABLE, "no_setting:1"]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == OK
    text = capsys.readouterr().out
    assert "the replayed reserve equals the recorded one to the byte, after each of" in text
    assert f"{own['reserved_bytes'] / MB:,.1f}" in text
    assert "no_setting" in text
    assert f"{allocator_variable()}=expandable_segments:True in the environment" in text
    (data,) = json.loads((tmp_path / "out.json").read_text("utf-8"))
    found = {row["settings"]: row for row in data["trials"] if not row["emptied_before_events"]}
    assert found[EXPANDABLE]["reserved_bytes"] == needed
    assert found[EXPANDABLE]["fits"] is True
    assert found["no_setting:1"]["error"]
    assert data["exactness"]["differing"] == 0


def test_file_without_events_cannot_be_replayed(tmp_path, capsys):
    """The error says how to record some."""
    path = made.written(tmp_path, made.snapshot((), [made.segment(made.BASE, 20 * MB, [])]))
    assert main(["replay", str(path)]) == UNUSABLE
    assert "it has no events; record them with" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_replays")
def test_beginning_that_no_card_has_is_refused(tmp_path, capsys):
    """A small segment of an exabyte would take for ever to fill: the error is one line."""
    base = made.BASE
    segment = made.segment(base, 2**60, [made.block(base, 512)], segment_type="small")
    events = [made.event("alloc", base + 2**61, 512)]
    path = made.written(tmp_path, made.snapshot(events, [segment]))
    assert main(["replay", str(path)]) == UNUSABLE
    lines = capsys.readouterr().err.splitlines()
    assert "at its start more memory was reserved but unused than any card" in lines[-1]


def test_size_below_a_context_is_refused(tmp_path, capsys):
    """A card must have more than its CUDA context takes."""
    path = made.written(tmp_path, made.two_allocations())
    assert main(["replay", str(path), "--memory", "100MB"]) == UNUSABLE
    assert "less than the 512 MB of a CUDA context; write" in capsys.readouterr().err


def test_program_of_the_benchmark_are_of_four_kinds():
    """The benchmark has twelve programs, three of each kind."""
    assert len(PROGRAMS) == 12


PROGRAM = """
import torch
keep = [torch.empty(300 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(60)]
"""


@pytest.mark.emulates
def test_emulated_device_writes_a_recording_of_a_program_that_runs_out(tmp_path):
    """--snapshot writes what the program had, with its lines and the refused allocation."""
    script, path = tmp_path / "train.py", tmp_path / "run.pickle"
    script.write_text(PROGRAM, encoding="utf-8")
    words = [*("--card", "t4", "--no-values", "--snapshot", str(path)), str(script)]
    done = forked_processes.run(
        ["python", "-m", "emulated_cuda", *words],
        environment={**os.environ, "RANK": ""},
        with_children=True,
    )
    assert done.returncode == 1
    assert f"python -m pytest_cka_memory snapshot {path}" in done.stderr
    snapshot = read(path)
    (device,) = snapshot.devices
    request_list = requests_of(snapshot, device)
    assert request_list.attempts == 1
    allocations = request_list.actions.count(replaying.ALLOCATE)
    assert allocations == (14909 - 512) // 300 or allocations == (14909 - 512) // 300 - 1
    sites = {snapshot.sites[place].frames[0].line for place in device.places if place}
    assert sites == {3}
