"""Recordings of blocks for the tests of the timeline, as a meter would give them."""

from itertools import accumulate

from pytest_cka_memory.core.memory_timeline import Place, RecordedBlock, Recording, picture_of


def block(size, begin, end=0, stack=1, *, on_host=False, inside=0, allocations=1):
    return RecordedBlock(size, begin, end, stack, allocations, on_host, inside)


def recording(*blocks, start_bytes=0, **rest):
    """A recording whose events are those of the blocks; the peak is found as a meter does."""
    events = max((max(one.begin, one.end) for one in blocks), default=0)
    changes = [0] * (events + 1)
    for one in blocks:
        if not one.on_host:
            changes[one.begin] += one.bytes * bool(one.begin)
            changes[one.end] -= one.bytes * bool(one.end)
    levels = list(accumulate(changes, initial=start_bytes))[1:]
    peak = max(levels)
    peak_event = levels.index(peak)
    given = {
        "events": events,
        "peak_event": peak_event,
        "peak_bytes": peak,
        "start_bytes": start_bytes,
        "host_start_bytes": 0,
        "insides": (None, "workspace of a library"),
        **rest,
    }
    return Recording(blocks=iter(blocks), site_of=lambda stack: None, module_path=str, **given)


def place(stack, inside=0):
    """Stack 1 is line 1 of a file, and so on; odd ones ran in a module."""
    module = f"layers.{stack}" if stack % 2 else ""
    return Place(f"net.py:{stack} in f", f"make({stack})", module, "", ("test.py:9 in test",))


def picture(made, place_of=place):
    return picture_of(made, lambda keys: [place_of(*key) for key in keys])


def moments_of(memory):
    runs = memory["moments"]
    return [
        first + n for first, count in zip(runs[::2], runs[1::2], strict=True) for n in range(count)
    ]


def levels_of(runs, count):
    """Return the level at each of `count` moments."""
    found = [0] * count
    for start, level in zip(runs[::2], runs[1::2], strict=True):
        found[start:] = [level] * (count - start)
    return found


def totals_of(memory, view):
    """Return the sum of all bands at each moment."""
    count = len(moments_of(memory))
    bands = [memory["before"], *(runs for _, runs in memory["views"][view])]
    return [sum(levels) for levels in zip(*(levels_of(runs, count) for runs in bands), strict=True)]
