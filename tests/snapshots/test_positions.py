"""Replays follow the order of the addresses that the recording's card gave."""

import ctypes
import random
from itertools import count
from pathlib import Path

import made
import pytest
import torch

from emulated_cuda import this_process
from pytest_cka_memory.cli.main import OK, main
from pytest_cka_memory.snapshots import replays, request_list
from pytest_cka_memory.snapshots.reading import read
from pytest_cka_memory.snapshots.replays import Run
from pytest_cka_memory.snapshots.request_list import requests_of

MB = made.MB
pytestmark = [pytest.mark.emulates, pytest.mark.usefixtures("forked_replays")]
OWN_POOL = {"pool_id": (0, 0)}
"""What events of torch 2.12 and later have."""
follows_orders = pytest.mark.skipif(
    torch.__version__.startswith("2.12."),
    reason="torch 2.12 takes the oldest block, so a replay follows no other order",
)


class Allocator:
    """A slow, obvious model of torch's allocator: best fit, then the lowest of ``order``.

    It has large blocks of one stream only. ``place`` returns the address of the next segment.
    """

    def __init__(self, place, order):
        self._place, self._order = place, order
        self._free = []
        """``(address, bytes, number of the segment)``."""
        self._live = {}
        self._segments = {}
        self.events = []

    def _event(self, action, address, size):
        self.events.append(made.event(action, address, size, **OWN_POOL))

    def allocate(self, size):
        fitting = [block for block in self._free if block[1] >= size]
        if not fitting:
            number = len(self._segments)
            address = self._place(number, size)
            self._segments[number] = (address, size)
            self._event("segment_alloc", address, size)
            fitting = [(address, size, number)]
            self._free.append(fitting[0])
        chosen = min(fitting, key=lambda block: (block[1], *self._order(block)))
        self._free.remove(chosen)
        address, available, number = chosen
        if available > size:
            self._free.append((address + size, available - size, number))
        self._live[address] = (size, number)
        self._event("alloc", address, size)
        return address

    def free(self, address):
        size, number = self._live.pop(address)
        for action in ("free_requested", "free_completed"):
            self._event(action, address, size)
        for other in list(self._free):
            start, length, segment = other
            if segment == number and start + length == address:
                address, size = start, size + length
                self._free.remove(other)
            elif segment == number and address + size == start:
                size += length
                self._free.remove(other)
        self._free.append((address, size, number))

    def snapshot(self):
        segments = []
        for number, (address, size) in self._segments.items():
            rows = [(at, length, "inactive") for at, length, of in self._free if of == number]
            rows += [
                (at, length, "active_allocated")
                for at, (length, of) in self._live.items()
                if of == number
            ]
            blocks = [made.block(at, length, state=state) for at, length, state in sorted(rows)]
            segments.append(made.segment(address, size, blocks))
        return made.snapshot(self.events, segments)


def by_address(block):
    return (block[0],)


def by_age(block):
    return (block[2], block[0])


def descending(number, size):
    return made.BASE - number * 2**30


def shuffled(number, size):
    return made.BASE + (number * 37 % 101) * 2**30


def recorded(place, order, seed=0):
    """Return the snapshot of 400 requests of few sizes, so that equal free blocks are frequent."""
    chance = random.Random(seed)
    allocator = Allocator(place, order)
    live = []
    for _ in range(400):
        if live and chance.random() < 0.48:
            allocator.free(live.pop(chance.randrange(len(live))))
        else:
            live.append(allocator.allocate(chance.choice((12, 16, 20, 24, 36, 48)) * MB))
    return allocator.snapshot()


def replayed(path, *runs):
    snapshot = read(path)
    (device,) = snapshot.devices
    request_list = requests_of(snapshot, device)
    results = replays.run(request_list, runs)
    return (
        request_list,
        device,
        [replays.exactness(request_list, device, result) for result in results],
    )


@follows_orders
@pytest.mark.parametrize("place", [descending, shuffled])
def test_reserve_is_that_of_an_allocator_whose_card_gives_such_addresses(tmp_path, place):
    """Of equal blocks the lowest is taken; in the order of our card the reserve would differ."""
    path = made.written(tmp_path, recorded(place, by_address))
    _, _, (found, ours) = replayed(path, Run("", False, True, True), Run("", False, True))
    assert found.is_exact
    assert found.allocations > 150
    assert found.growths > 20
    assert (found.misplaced_segments, found.ignored_addresses) == (0, False)
    assert ours.differing > 20


@follows_orders
def test_recording_that_begins_in_the_middle_keeps_the_order(tmp_path):
    """Segments from before the recording have their place among those that came later."""
    data = recorded(descending, by_address)
    del data["device_traces"][0][:150]
    found = replayed(made.written(tmp_path, data), Run("", False, True, True))[2][0]
    assert found.is_exact
    assert found.wrong_segments == 0
    assert found.growths > 3


@follows_orders
def test_order_of_ages_is_found(tmp_path):
    """Since torch 2.13 the oldest segment is taken; a file does not tell of which version it is."""
    path = made.written(tmp_path, recorded(descending, by_age))
    request_list, device, (exact,) = replayed(path, Run("", False, True, True))
    assert exact.differing > 20
    aged = replays.in_order_of_ages(request_list, device, "", exact)
    assert aged is not None
    assert replays.exactness(request_list, device, aged[0]).is_exact


@pytest.mark.slow
@follows_orders
def test_command_finds_the_order(tmp_path, capsys):
    """The row of the recording's own settings has the recorded reserve, whichever order it had."""
    for order in (by_address, by_age):
        data = recorded(descending, order)
        path = made.written(tmp_path, data)
        assert main(["replay", str(path), "--try", "expandable_segments:True"]) == OK
        output = capsys.readouterr().out
        size = sum(segment["total_size"] for segment in data["segments"]) / MB
        assert "the replayed reserve equals the recorded one to the byte, after each of" in output
        (row,) = [line for line in output.splitlines() if line.startswith("as recorded: ")]
        assert f"{size:,.1f}" in row.split()


@pytest.mark.slow
def test_allocator_that_ignores_addresses_is_named(tmp_path, capsys, monkeypatch):
    """A version whose order cannot be changed replays in that of ages, and the text says so."""
    results_of = replays._results

    def ignored(job):
        wanted = [run["positioned"] for run in job["runs"]]
        runs = [{**run, "positioned": False} for run in job["runs"]]
        results = results_of({**job, "runs": runs})
        return [
            {**result, "ignored_positions": each}
            for result, each in zip(results, wanted, strict=True)
        ]

    monkeypatch.setattr(replays, "_results", ignored)
    path = made.written(tmp_path, recorded(descending, by_address))
    assert main(["replay", str(path), "--try", "expandable_segments:True"]) == OK
    output = capsys.readouterr().out
    assert "the replayed reserve differs from the recorded one after" in output
    assert "versions before 2.12 take the block at the lowest address" in output


def equal(number, size):
    return made.BASE


def overlapping(number, size):
    return made.BASE - number * 4 * MB


def outside(number, size):
    return 2**64 - 2**40 * (number + 1)


def not_aligned(number, size):
    return made.BASE - number * 2**30 + 512 * (number + 1)


def of_all_kinds(number, size):
    return (0, 1, 2**63 - 1, 2**63, 2**64 - 1, made.BASE, made.BASE + 1)[number % 7]


@pytest.mark.parametrize("place", [equal, overlapping, outside, not_aligned, of_all_kinds])
def test_hostile_addresses_are_replayed_in_another_order(tmp_path, capsys, place):
    """Nothing is refused or wrong: what cannot be placed is above all others, and is counted."""
    events = [
        made.event(action, place(number, 20 * MB), 20 * MB)
        for number in range(12)
        for action in ("segment_alloc", "alloc")
    ]
    path = made.written(tmp_path, made.snapshot(events))
    assert main(["replay", str(path), "--try", "expandable_segments:True"]) == OK
    output = capsys.readouterr().out
    assert (
        "the replayed reserve equals the recorded one to the byte, after each of 12 allocations"
        in output
    )
    is_possible = place in (outside, not_aligned)
    assert ("could not get the recorded address" in output) is not is_possible


def test_huge_sizes_take_no_memory(tmp_path, capsys):
    """Ranges that no card has leave no room for positions."""
    events = [
        event
        for number in range(4)
        for event in (
            made.event("segment_alloc", number * 2**61, 2**63),
            made.event("alloc", number * 2**61, 20 * MB),
        )
    ]
    path = made.written(tmp_path, made.snapshot(events))
    assert main(["replay", str(path), "--try", "expandable_segments:True"]) == OK
    assert "3 segments could not get the recorded address" in capsys.readouterr().out


def test_positions_keep_order_gaps_and_overlaps():
    """Gaps are closed, what overlaps still does, and units of the driver are not divided."""
    unit = 2 * MB
    given = [(10 * unit + 512, unit), (0, unit), (unit, 2 * unit), (2 * unit, unit), (2**70, 0)]
    found, total = request_list.positions_of(given)
    assert [at // unit for at in found] == [3, 0, 1, 2, 4]
    assert total == 4 * unit


@pytest.mark.slow
def test_million_positions_are_computed_in_seconds():
    """The time does not grow with the square of the number."""
    numbers = count()
    given = [(2**40 - 4 * MB * next(numbers), 2 * MB) for _ in range(1_000_000)]
    found, total = request_list.positions_of(given)
    assert found[0] == total - 2 * MB
    assert found[-1] == 0


VARIABLE = "FLAGS_caffe2_keep_on_shrink"
"""A bool that libc10 exports, so that the dynamic linker knows its address, too."""


def test_address_of_a_variable_is_that_of_the_dynamic_linker():
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    wanted = ctypes.addressof(ctypes.c_bool.in_dll(library, VARIABLE))
    assert this_process.address_of_variable("libc10.so", VARIABLE, 1) == wanted


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [("libnone.so", VARIABLE, 1), ("libc10.so", VARIABLE[:-1], 1), ("libc10.so", VARIABLE, 4)],
    ids=["library", "name", "size"],
)
def test_variable_that_is_not_there_has_no_address(library, name, size):
    assert this_process.address_of_variable(library, name, size) is None
