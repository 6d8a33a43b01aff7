"""What a reserve consists of, from segments as an allocator's snapshot has them."""

from dataclasses import replace

import pytest

from pytest_cka_memory.core.figures import RegionRecord
from pytest_cka_memory.core.reserve import (
    NO_POOL,
    DrawnBlock,
    DrawnSegment,
    explain_reserve,
    reserve_advice,
    reserve_lines,
    total_of,
)
from pytest_cka_memory.core.retention import Holding
from pytest_cka_memory.reports.excess import keeper_line, reserve_explanation
from pytest_cka_memory.reports.html import stacks

MB = 2**20
SPLIT = {"max_split_size": 128 * MB}


def segment(*blocks, address=0, pool=NO_POOL, stream=0, expandable=False, kind="large"):
    """Return a segment of blocks ``(state, MB, unused MB)``, one after the other."""
    made, offset = [], 0
    for state, size, *unused in blocks:
        made.append(
            {
                "address": address + offset,
                "size": size * MB,
                "requested_size": (size - (unused[0] if unused else 0)) * MB,
                "state": state,
            }
        )
        offset += size * MB
    return {
        "address": address,
        "total_size": offset,
        "segment_pool_id": pool,
        "stream": stream,
        "is_expandable": expandable,
        "segment_type": kind,
        "blocks": made,
    }


USED, FREE, WAITING = "active_allocated", "inactive", "active_pending_free"


def in_mb(part):
    names = ("reserved", "in_use", "rounding", "waiting", "free_whole", "free_part")
    return tuple(getattr(part, f"{name}_bytes") // MB for name in names)


def test_block_in_use_keeps_the_rest_of_its_segment():
    state = explain_reserve([segment((USED, 2, 1), (FREE, 18)), segment((FREE, 20), address=100)])
    assert [in_mb(part) for part in state.parts] == [(40, 1, 1, 0, 20, 18)]
    assert state.parts[0].largest_free_bytes == 20 * MB
    assert state.keeps([0]) == 18 * MB
    assert state.keeps([100]) == 0


def test_block_that_waits_for_a_stream_keeps_its_segment_too():
    state = explain_reserve([segment((WAITING, 4), (FREE, 16))])
    assert in_mb(state.parts[0]) == (20, 0, 0, 4, 0, 16)
    assert state.keeps([0]) == 16 * MB


def test_of_an_expandable_segment_only_pages_with_blocks_in_use_are_kept():
    # Pages of 20 MB: the block takes 1 MB of the second and 2 MB of the third.
    state = explain_reserve([segment((FREE, 39), (USED, 3), (FREE, 38), expandable=True)])
    assert in_mb(state.parts[0]) == (80, 3, 0, 0, 40, 37)
    assert state.keeps([39 * MB]) == 37 * MB


def test_block_over_several_pages_uses_those_between_as_a_whole():
    state = explain_reserve([segment((FREE, 10), (USED, 65), (FREE, 5), expandable=True)])
    assert in_mb(state.parts[0]) == (80, 65, 0, 0, 0, 15)


def test_pages_of_small_blocks_have_two_megabytes():
    state = explain_reserve([segment((USED, 1), (FREE, 5), expandable=True, kind="small")])
    assert in_mb(state.parts[0]) == (6, 1, 0, 0, 4, 1)


def test_pages_have_the_size_that_is_set():
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:40"}
    state = explain_reserve([segment((USED, 2), (FREE, 78), expandable=True)], setting)
    assert in_mb(state.parts[0]) == (80, 2, 0, 0, 40, 38)
    assert state.parts[0].is_expandable


def test_last_page_of_a_segment_may_be_shorter():
    state = explain_reserve([segment((FREE, 20), (USED, 1), (FREE, 4), expandable=True)])
    assert in_mb(state.parts[0]) == (25, 1, 0, 0, 20, 4)


def test_pools_and_streams_are_apart_the_largest_first():
    segments = [
        segment((USED, 2)),
        segment((FREE, 30), stream=7),
        segment((USED, 20), pool=(0, 3)),
        segment((FREE, 5), stream=7, address=1000),
    ]
    state = explain_reserve(segments, pool_name=lambda pool: f"graph {pool[1]}")
    assert [(it.pool, it.stream, it.segments) for it in state.parts] == [
        ("", 1, 2),
        ("graph 3", 0, 1),
        ("", 0, 1),
    ]
    assert list(reserve_lines(state.parts)) == [
        "of 57.00 MB reserved, 22.00 MB in use, 35.00 MB free in whole segments",
        "the largest free block has 30.00 MB",
        "stream 1: 35.00 MB, 0 in use, 35.00 MB free in whole segments",
        "graph 3, the default stream: 20.00 MB, 20.00 MB in use",
        "the default stream: 2.00 MB, 2.00 MB in use",
    ]


def test_free_blocks_of_the_split_limit_are_counted_apart():
    state = explain_reserve([segment((FREE, 128)), segment((FREE, 100))], SPLIT)
    assert state.parts[0].oversized_bytes == 128 * MB


def test_blocks_without_addresses_are_numbered_from_their_segment():
    plain = segment((FREE, 3), (USED, 1), address=4096)
    for block in plain["blocks"]:
        del block["address"]
    assert explain_reserve([plain]).keeps([4096 + 3 * MB]) == 3 * MB


@pytest.mark.parametrize(
    ("segments", "begin"),
    [
        ([segment((FREE, 128), (USED, 2))], "leave max_split_size_mb out of"),
        ([segment((WAITING, 90), (USED, 10))], "synchronize before these blocks"),
        (
            [segment((FREE, 90), pool=(0, 1)), segment((USED, 10))],
            "delete every graph of the",
        ),
        ([segment((FREE, 60), stream=3), segment((USED, 70))], "allocate on one stream, or"),
        ([segment((USED, 2), (FREE, 60))], "allocate the tensors that stay before those"),
        ([segment((FREE, 60)), segment((USED, 2))], "set PYTORCH_"),
        ([segment((USED, 95), (FREE, 5))], "raise the limit to leave room for one segment"),
        ([segment((USED, 95))], ""),
        ([], ""),
    ],
)
def test_advice_is_about_the_largest_cause(segments, begin):
    advice = reserve_advice(explain_reserve(segments, SPLIT).parts)
    assert advice.startswith(begin)
    assert bool(advice) == bool(begin)


def test_total_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no reserve to explain"):
        total_of([])
    assert list(reserve_lines([])) == ["nothing is reserved"]


@pytest.mark.slow
def test_ten_thousand_segments_of_a_hundred_blocks_add_up():
    segments = [
        segment(*[(USED, 1), (FREE, 1)] * 50, address=number * 200 * MB) for number in range(10_000)
    ]
    state = explain_reserve(segments)
    assert in_mb(state.parts[0]) == (1_000_000, 500_000, 0, 0, 0, 500_000)
    assert len(state.partly_used) == 10_000


def test_segments_with_the_most_that_cannot_be_released_are_drawn():
    """The largest eight, in the order of addresses, with what is in use; ties are no error."""
    segments = [segment((USED, 1), (FREE, size), address=size * 1000) for size in range(40, 20, -1)]
    segments += [segment((FREE, 30), (USED, 1), (FREE, 2), (USED, 1), address=1)] * 30
    drawn = explain_reserve(segments).drawn
    assert [it.bytes // MB for it in drawn] == list(range(34, 42))
    assert [(block.offset, block.bytes) for block in drawn[0].blocks] == [(0, MB)]
    (gaps,) = explain_reserve(segments[-1:]).drawn
    assert [(block.offset // MB, block.bytes // MB) for block in gaps.blocks] == [(30, 1), (33, 1)]


def test_page_draws_a_bar_for_each_segment_and_names_the_lines():
    """Each bar is as wide as its segment, with gaps where memory is free; lines are escaped."""
    blocks = DrawnBlock(10 * MB, 5 * MB, 1, "net.py:7"), DrawnBlock(15 * MB, MB, 2, "<b>.py:1")
    record = RegionRecord(
        label="",
        completed=True,
        start_bytes=0,
        end_bytes=0,
        peak_bytes=0,
        retained_bytes=0,
        reserve_segments=(DrawnSegment(20 * MB, blocks), DrawnSegment(40 * MB, ())),
    )
    text = "".join(stacks.segments(record))
    assert "style='width:50.00%'><s style='width:50.000%'></s><i class='c0'" in text
    assert "<i class='c0' style='width:25.000%'></i><i class='c1' style='width:5.000%'></i>" in text
    assert "<span>5.00 MB</span><code>net.py:7</code>" in text
    assert "<code>&lt;b&gt;.py:1</code>" in text
    assert RegionRecord.from_dict(record.to_dict()) == record
    assert list(stacks.segments(replace(record, reserve_segments=()))) == []


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(
            50_000,
            ["  and more blocks, not listed, that keep the other 220.00 MB of free memory"],
            id="cut",
        ),
        pytest.param(49_999, [], id="all-described"),
    ],
)
def test_message_says_that_not_all_blocks_are_described(count, expected):
    """Of very many blocks beside free memory only those beside the most are described."""
    state = explain_reserve([segment(("active_allocated", 733), ("inactive", 245))])
    keeps = Holding(bytes=25 * MB, count=count, keeps_bytes=25 * MB)
    record = RegionRecord(
        label="",
        completed=True,
        start_bytes=0,
        end_bytes=0,
        peak_bytes=0,
        retained_bytes=0,
        reserve=state.parts,
        reserve_moment="at the end",
        reserve_kept_by=(keeps,),
    )
    lines = list(reserve_explanation(record, 100))
    assert [line for line in lines if "not listed" in line] == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, "2.00 MB made at train.py:13, held by kept[0], prevents the release of 18.00 MB of"),
        (2, "2.00 MB in 2 tensors made at train.py:13, held by kept[0], prevent the release of"),
    ],
    ids=["one", "two"],
)
def test_line_of_a_group_says_how_much_it_keeps_from_being_released(count, expected):
    """One block prevents the release of free memory beside it, several that beside them."""
    group = Holding(
        bytes=2 * MB,
        count=count,
        created_at=("train.py:13",),
        held_by="kept[0]",
        keeps_bytes=18 * MB,
    )
    line = keeper_line(group)
    assert line.startswith(expected)
    assert line.endswith("18.00 MB of free memory beside " + ("it" if count == 1 else "them"))
