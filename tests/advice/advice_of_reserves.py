"""Hints on a reserve that is larger than what is in use."""

import warnings

import pytest
import torch
from advice_table import CARD, CLEANUP, KEEP, advice, follows

MB = 2**20
PLAIN = "expandable_segments:False,max_split_size_mb:1048576"


def set_up(settings):
    """Set the allocator up for one program."""
    torch.cuda.empty_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.memory._set_allocator_settings(settings)
    if settings != PLAIN:
        CLEANUP.callback(set_up, PLAIN)


def empty(mb):
    return torch.empty(int(mb * MB), dtype=torch.uint8, device="cuda")


def joined(cka_memory):
    with cka_memory.measure():
        for _ in range(8):
            blocks = [empty(34) for _ in range(4)]
            KEEP.append(empty(2))
            del blocks


@advice(
    "leave max_split_size_mb out of PYTORCH_ALLOC_CONF, or make it larger; free blocks of "
    "at least that size serve only requests of at least that size",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(300),
)
def oversized(cka_memory):
    set_up("max_split_size_mb:128,expandable_segments:True")
    joined(cka_memory)


@follows(oversized)
def without_the_split_limit(cka_memory):
    set_up("expandable_segments:True")
    joined(cka_memory)


@follows(oversized)
def with_a_larger_split_limit(cka_memory):
    set_up("max_split_size_mb:1024,expandable_segments:True")
    joined(cka_memory)


@advice(
    "allocate on one stream, or call torch.cuda.empty_cache() after the work of the other stream; "
    "the allocator does not use free memory of one stream for another",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(260),
)
def other_streams(cka_memory):
    with cka_memory.measure():
        for _ in range(8):
            with torch.cuda.stream(torch.cuda.Stream()):
                empty(60)
        KEEP.append(empty(30))


@follows(other_streams)
def one_stream(cka_memory):
    with cka_memory.measure():
        for _ in range(8):
            empty(60)
        KEEP.append(empty(30))


@follows(other_streams)
def cache_emptied_after_each_stream(cka_memory):
    with cka_memory.measure():
        for _ in range(8):
            with torch.cuda.stream(torch.cuda.Stream()):
                empty(60)
            torch.cuda.empty_cache()
        KEEP.append(empty(30))


@advice(
    "allocate the tensors that stay before those that are freed, so that the two kinds do not "
    "alternate in memory; to see which settings of the allocator help, run python -m "
    "pytest_cka_memory replay on a snapshot",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(450),
)
def side_by_side(cka_memory):
    with cka_memory.measure():
        others = []
        for _ in range(20):
            others += [empty(4) for _ in range(4)]
            KEEP.append(empty(4))
        del others
        KEEP.append(empty(300))


@follows(side_by_side)
def kept_first(cka_memory):
    with cka_memory.measure():
        KEEP.extend(empty(4) for _ in range(20))
        others = [empty(4) for _ in range(80)]
        del others
        torch.cuda.empty_cache()
        KEEP.append(empty(300))


def growing(cka_memory):
    with cka_memory.measure():
        for batch in range(16):
            empty(20 + 4 * batch)


@advice(
    "set PYTORCH_ALLOC_CONF=expandable_segments:True, so that the allocator can join free "
    "memory, or call torch.cuda.empty_cache() to release it; the free blocks do not fit "
    "requests of other sizes",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(100),
)
def growing_requests(cka_memory):
    set_up(PLAIN)
    growing(cka_memory)


@follows(growing_requests)
def growing_requests_that_are_joined(cka_memory):
    set_up("expandable_segments:True")
    growing(cka_memory)


@follows(growing_requests)
def growing_requests_with_an_empty_cache(cka_memory):
    set_up(PLAIN)
    with cka_memory.measure():
        for batch in range(16):
            empty(20 + 4 * batch)
            torch.cuda.empty_cache()


@advice(
    "call torch.cuda.empty_cache() to release the free memory; it was in use at another moment",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(140),
)
def small_blocks_then_a_large_one(cka_memory):
    set_up("expandable_segments:True")
    with cka_memory.measure():
        blocks = [empty(0.5) for _ in range(200)]
        del blocks
        empty(100)


@follows(small_blocks_then_a_large_one)
def cache_emptied_between_them(cka_memory):
    set_up("expandable_segments:True")
    with cka_memory.measure():
        blocks = [empty(0.5) for _ in range(200)]
        del blocks
        torch.cuda.empty_cache()
        empty(100)


@advice(
    "raise the limit to leave room for one segment of each kind; the allocator takes segments of "
    "2 MB for blocks up to 1 MB, of 20 MB for blocks up to 10 MB, and of a multiple of 2 MB for "
    "larger blocks",
    devices=(CARD,),
    limit=pytest.mark.max_reserved_mb(10),
    is_command=True,
)
def one_segment(cka_memory):
    set_up(PLAIN)
    with cka_memory.measure():
        torch.ones(2 * MB, dtype=torch.uint8, device="cuda")
