"""Ranks leave word for one another on a board, and wait no longer than is bearable."""

from random import Random

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations.torchrun import (
    HURRIED_S,
    RankSync,
    Rank,
    this_rank,
    torchrun_store,
)

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


class Clock:
    """Time that passes only while someone sleeps; `at` may do things meanwhile."""

    def __init__(self):
        self.now = 0.0
        self.at = {}

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def meet(clock):
    """The meeting of rank n over one board, with 10 s of patience."""
    board = HashStore()
    return lambda n: RankSync(
        Rank(n, 3, n, "0"), 10.0, connect=lambda rank: board, clock=clock, sleep=clock.sleep
    )


def test_ranks_that_were_given_no_store_are_told_how_to_get_one(monkeypatch):
    """Static rendezvous shares none."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(RankError, match="leave its rendezvous at c10d"):
        torchrun_store(Rank(0, 2, 0, "0"))


def test_a_store_that_does_not_answer_is_named(monkeypatch):
    """Where it should have been."""

    def refused(*args, **kwargs):
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(dist, "TCPStore", refused)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29400")
    with pytest.raises(RankError, match="the store of torchrun at localhost:29400 cannot be"):
        torchrun_store(Rank(0, 2, 0, "0"))


@pytest.mark.parametrize(
    "data",
    [None, [], {"a": [1, 2.5, "ü\udc80"]}, Random(0).randbytes(2**21).hex()],
    ids=["none", "empty", "escapes", "longer-than-a-chunk"],
)
def test_what_one_says_another_hears(meet, data):
    """Any builtin data of any size."""
    meet(1).say("figures", data)
    assert meet(0).hear("figures", [1]) == {1: data}


def test_several_are_heard_in_any_order(meet, clock):
    """Each whenever it comes."""
    meet(2).say("figures", "second")
    clock.at = {3: lambda: meet(1).say("figures", "first")}
    assert meet(0).hear("figures", [1, 2]) == {1: "first", 2: "second"}


def test_a_silent_rank_is_given_up(meet, clock):
    """After the time one has, all silent ranks at once; the others are heard."""
    meet(2).say("figures", "here")
    assert meet(0).hear("figures", [1, 2, 3, 4]) == {2: "here"}
    assert clock.now == pytest.approx(10.0, abs=0.1)


def test_a_rank_that_gets_on_is_waited_for(meet, clock):
    """Each test that it ends starts its time anew."""
    clock.at = {when: meet(1).beat for when in (8, 16, 24)}
    clock.at[32] = lambda: meet(1).say("figures", "slow")
    assert meet(0).hear("figures", [1]) == {1: "slow"}


def test_a_rank_that_stops_getting_on_is_given_up(meet, clock):
    """Its time counts from the last test it ended."""
    clock.at = {8: meet(1).beat}
    assert meet(0).hear("figures", [1]) == {}
    assert clock.now == pytest.approx(18.0, abs=0.2)


def test_who_is_told_to_stop_hurries(meet, clock):
    """Though in the middle of waiting."""
    meeting = meet(0)
    clock.at = {1: meeting.hurry}
    assert meeting.hear("figures", [1]) == {}
    assert clock.now == pytest.approx(HURRIED_S, abs=0.1)


def test_what_was_said_half_is_not_heard(meet):
    """The chunks come first: a rank that dies over them has said nothing."""
    meet(1).board.set("figures/1/0", "x")
    assert meet(0).hear("figures", [1]) == {}


def test_torchrun_says_which_rank_this_is():
    """By the variables it sets for each process."""
    assert this_rank(TORCHRUN) == Rank(number=1, world=2, local=1, attempt="0")
    again = this_rank({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    assert again is not None
    assert again.attempt == "2"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {key: text for key, text in TORCHRUN.items() if key != "TORCHELASTIC_RUN_ID"},
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
    ],
    ids=["nothing-set", "a-cluster-sets-them-too", "one-process"],
)
def test_a_process_alone_is_no_rank(environ):
    """It reports for itself, as ever."""
    assert this_rank(environ) is None
