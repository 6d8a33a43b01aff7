"""Ranks exchange data through a shared store and wait for one another until a timeout."""

from random import Random

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from pytest_cka_memory.errors import RankError
from pytest_cka_memory.integrations import Rank, this_rank
from pytest_cka_memory.integrations.torchrun import SHORT_WAIT_S, RankSync, torchrun_store

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}


class Clock:
    """Time that passes only in `sleep`; `at` maps times to functions to call at that time."""

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
def sync_of(clock):
    """Return a function that makes rank n's RankSync on a shared store, with 10 s as timeout."""
    store = HashStore()
    return lambda n: RankSync(
        Rank(n, 3, n, "0"), 10.0, connect=lambda rank: store, clock=clock, sleep=clock.sleep
    )


def test_ranks_without_a_store_get_an_error_that_says_how_to_get_one(monkeypatch):
    """Without a store a rank gets an error that says how to get one from torchrun."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(RankError, match="store with the ranks; use --rdzv-backend=c10d"):
        torchrun_store(Rank(0, 2, 0, "0"))


def test_a_store_that_cannot_be_reached_is_an_error_with_its_address(monkeypatch):
    """The error for a store that cannot be reached has its host and port."""

    def refused(*args, **kwargs):
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(dist, "TCPStore", refused)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29400")
    with pytest.raises(RankError, match="the store of torchrun at localhost:29400 does not"):
        torchrun_store(Rank(0, 2, 0, "0"))


@pytest.mark.parametrize(
    "data",
    [None, [], {"a": [1, 2.5, "ü\udc80"]}, Random(0).randbytes(2**21).hex()],
    ids=["none", "empty", "escapes", "longer-than-a-chunk"],
)
def test_a_rank_receives_what_another_publishes(sync_of, data):
    """A rank receives builtin data of any type and size that another one publishes."""
    sync_of(1).publish("results", data)
    assert sync_of(0).collect("results", [1]) == {1: data}


def test_data_of_several_ranks_is_received_in_any_order(sync_of, clock):
    """Data of several ranks is received in whatever order they publish it."""
    sync_of(2).publish("results", "second")
    clock.at = {3: lambda: sync_of(1).publish("results", "first")}
    assert sync_of(0).collect("results", [1, 2]) == {1: "first", 2: "second"}


def test_ranks_that_publish_nothing_are_given_up_after_the_timeout(sync_of, clock):
    """Ranks that publish nothing are given up after one timeout; data of others is returned."""
    sync_of(2).publish("results", "here")
    assert sync_of(0).collect("results", [1, 2, 3, 4]) == {2: "here"}
    assert clock.now == pytest.approx(10.0, abs=0.1)


def test_a_rank_that_keeps_finishing_tests_is_waited_for(sync_of, clock):
    """Each test that a rank finishes restarts its timeout, so that it is waited for."""
    clock.at = {when: sync_of(1).heartbeat for when in (8, 16, 24)}
    clock.at[32] = lambda: sync_of(1).publish("results", "slow")
    assert sync_of(0).collect("results", [1]) == {1: "slow"}


def test_a_rank_that_stops_finishing_tests_is_given_up(sync_of, clock):
    """A rank that stops finishing tests is given up, a timeout after the last one."""
    clock.at = {8: sync_of(1).heartbeat}
    assert sync_of(0).collect("results", [1]) == {}
    assert clock.now == pytest.approx(18.0, abs=0.2)


def test_shorten_wait_shortens_the_timeout_of_a_wait_in_progress(sync_of, clock):
    """A wait can be shortened, because a rank that has received SIGTERM must not wait for long."""
    sync = sync_of(0)
    clock.at = {1: sync.shorten_wait}
    assert sync.collect("results", [1]) == {}
    assert clock.now == pytest.approx(SHORT_WAIT_S, abs=0.1)


@pytest.mark.parametrize(("test", "seconds"), [("before", 10.0), ("after", 5.0), (None, 5.0)])
def test_a_rank_in_one_of_some_tests_is_waited_for_as_long_as_before(sync_of, clock, test, seconds):
    """It cannot be waiting for a test that it has not reached."""
    if test:
        sync_of(1).begin(test)
    sync = sync_of(0)
    sync.shorten_wait(unless_in={"before"})
    assert sync.collect("results", [1]) == {}
    assert clock.now == pytest.approx(seconds, abs=0.1)
    sync.shorten_wait()  # the process is to end: for every rank
    assert sync.timeout_of(1) == SHORT_WAIT_S


def test_the_test_that_a_rank_has_begun_last_is_known_to_the_others(sync_of):
    """Nothing is known of a rank that has begun none."""
    for test in ("first", "second"):
        sync_of(1).begin(test)
    assert (sync_of(0).test_of(1), sync_of(0).test_of(2)) == ("second", None)


def test_incompletely_published_data_is_not_received(sync_of):
    """A rank may die after writing some of its chunks; such data is not received."""
    sync_of(1).store.set("results/1/0", "x")
    assert sync_of(0).collect("results", [1]) == {}


def test_the_rank_is_read_from_the_variables_of_torchrun():
    """Torchrun sets the rank's number for each process, and its restart count as the attempt."""
    assert this_rank(TORCHRUN) == Rank(number=1, world_size=2, local=1, attempt="0")
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
def test_a_single_process_is_not_a_rank(environ):
    """A single process is not a rank, and writes its own report as without torchrun."""
    assert this_rank(environ) is None
