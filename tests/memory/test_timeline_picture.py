"""What a recording becomes: levels at some moments, in bands, and groups of blocks."""

import json
import random

import pytest
from recordings_made import block, levels_of, moments_of, picture, place, recording, totals_of

from pytest_cka_memory.core import memory_timeline
from pytest_cka_memory.core.memory_timeline import Place

VIEWS = ("module", "line")


def many(events, seed=0):
    """Blocks of random sizes and lives, of twenty places; one event at each number."""
    chance = random.Random(seed)
    live, made = [], []
    for event in range(1, events + 1):
        if live and chance.random() < 0.49:
            made.append(live.pop(chance.randrange(len(live)))._replace(end=event))
        else:
            live.append(block(chance.randrange(1, 5000), event, stack=chance.randrange(20)))
    return [*made, *live]


@pytest.mark.parametrize("view", VIEWS)
def test_bands_add_up_to_the_level_at_each_moment(view):
    """The bands add up to the level after each event, from the level at the start on."""
    made = recording(block(10, 1, 3, stack=1), block(5, 2, stack=2), start_bytes=100)
    (memory,) = picture(made)["memories"]
    assert moments_of(memory) == [0, 1, 2, 3]
    assert totals_of(memory, view) == [100, 110, 115, 105]
    assert memory["peak"] == 2


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("seed", range(3))
def test_peak_of_many_events_is_exact(view, seed):
    """With more events than moments, the peak is a moment and the bands add up to it exactly."""
    made = recording(*many(20_000, seed), start_bytes=7)
    peak = made.peak_bytes, made.peak_event
    (memory,) = picture(made)["memories"]
    totals, moments = totals_of(memory, view), moments_of(memory)
    assert len(moments) < 1000
    assert (max(totals), moments[totals.index(max(totals))]) == peak
    assert moments[memory["peak"]] == made.peak_event
    assert memory["unknown"] == 0


def test_moments_are_the_highest_of_every_few():
    """Each drawn level is the highest level of the events around it."""
    blocks = many(20_000)
    made = recording(*blocks)
    (memory,) = picture(made)["memories"]
    changes = [0] * (made.events + 1)
    for one in blocks:
        changes[one.begin] += one.bytes
        changes[one.end] -= one.bytes * bool(one.end)
    levels = [sum(changes[:1])]
    for change in changes[1:]:
        levels.append(levels[-1] + change)
    moments, totals = moments_of(memory), totals_of(memory, "line")
    assert totals == [levels[moment] for moment in moments]
    width = -(-len(levels) // 500)
    drawn = set(moments)
    for start in range(0, len(levels), width):
        part = levels[start : start + width]
        assert start + part.index(max(part)) in drawn


def test_peak_is_exact_if_levels_are_computed_after_every_few_events(monkeypatch):
    """With very many events, the levels between are left out, and the peak is still exact."""
    monkeypatch.setattr(memory_timeline, "_MOST_LEVELS", 2000)
    made = recording(*many(20_000), start_bytes=7)
    (memory,) = picture(made)["memories"]
    totals, moments = totals_of(memory, "line"), moments_of(memory)
    assert totals[memory["peak"]] == made.peak_bytes == max(totals)
    assert moments[memory["peak"]] == made.peak_event
    assert (moments[0], moments[-1], memory["unknown"]) == (0, made.events, 0)


def test_release_of_older_memory_lowers_the_band_before_the_region():
    """What was live before the region is a band of its own, which its releases lower."""
    (memory,) = picture(recording(block(30, 0, 2), block(5, 1), start_bytes=100))["memories"]
    assert levels_of(memory["before"], 3) == [100, 100, 70]


def test_host_has_a_picture_of_its_own():
    """Blocks on the host beside a device are in a second picture, with the host's own peak."""
    made = recording(block(10, 1), block(3, 2, 4, on_host=True), block(7, 3, on_host=True))
    device, host = picture(made)["memories"]
    assert (device["host"], host["host"]) == (False, True)
    assert totals_of(device, "line") == [0, 10, 10, 10, 10]
    assert totals_of(host, "line") == [0, 0, 3, 10, 7]
    assert host["peak"] == 3


def test_difference_to_the_meters_peak_is_stated():
    """If the meter's peak is higher than what was recorded, the picture says by how much."""
    (memory,) = picture(recording(block(10, 1), peak_bytes=12))["memories"]
    assert memory["unknown"] == 2


def test_smaller_lines_share_a_band():
    """There are twelve bands at most; the last has all lines that allocated less."""
    blocks = [block(100 * n, n, stack=2 * n) for n in range(1, 31)]
    (memory,) = picture(recording(*blocks))["memories"]
    labels = [label for label, _ in memory["views"]["line"]]
    assert len(labels) == 12
    assert labels[0] == "net.py:60 in f: make(60)"
    assert labels[-1] == "19 other lines"
    assert totals_of(memory, "line")[-1] == sum(one.bytes for one in blocks)


def in_modules(*paths):
    def place_of(stack, inside):
        return Place("net.py:1 in f", "", paths[stack], "", ())

    return place_of


def test_large_modules_are_divided():
    """A band is a module; the largest are divided into their children while there is space."""
    parts = ("norm", "up", "down")
    paths = ["embed", *(f"layers.{n}.{part}" for n in range(4) for part in parts)]
    blocks = [block(100 + n, n + 1, stack=n) for n in range(len(paths))]
    (memory,) = picture(recording(*blocks), in_modules(*paths))["memories"]
    assert {label for label, _ in memory["views"]["module"]} == {
        *("embed", "layers.0", "layers.1"),
        *(f"layers.{n}.{part}" for n in (2, 3) for part in parts),
    }


def test_memory_outside_modules_is_in_bands_of_lines():
    """What no module allocated has its line in the view of modules."""
    (memory,) = picture(recording(block(9, 1, stack=1), block(5, 2, stack=2)))["memories"]
    assert [label for label, _ in memory["views"]["module"]] == [
        "layers.1",
        "no module: net.py:2 in f: make(2)",
    ]


def test_groups_say_how_many_blocks_are_live_at_the_peak():
    """Blocks of one place and size are a group: their number in all, at the peak and at the end."""
    made = recording(
        block(8, 1, 5), block(8, 2, 6), block(8, 3), block(2, 4, stack=2), block(8, 7, 8)
    )
    (memory,) = picture(made)["memories"]
    first, second = memory["groups"]
    assert first == [0, 8, 4, 3, 24, 1, 1, 8, [0, 0]]
    assert second == [1, 2, 1, 1, 2, 1, 4, 0, [1, 1]]
    assert memory["places"][0] == [*place(1)[:4], ["test.py:9 in test"]]


def test_million_events_are_reduced_to_a_small_picture():
    """The picture of many events has no more data than a page can hold many times."""
    made = recording(*(block(n % 97 + 1, 2 * n + 1, 2 * n + 2, n % 30) for n in range(50_000)))
    assert len(json.dumps(picture(made))) < 300_000
