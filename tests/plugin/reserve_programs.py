"""Programs whose reserve is larger than what is in use, or is not; run on the emulated card.

Each planted one breaks a limit. What keeps free memory from being released was allocated in the
line that ends with ``# kept``.
"""

import itertools
import warnings

import pytest
import torch

MB = 2**20
reserve = pytest.mark.flat_per_batch(of="reserved")
PLAIN = "expandable_segments:False"
EXPANDABLE = "expandable_segments:True"


@pytest.fixture
def allocator():
    """Return a function that sets the allocator up; the usual settings come back."""

    def set_up(settings):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.empty_cache()
            torch.cuda.memory._set_allocator_settings(settings)

    yield set_up
    set_up("expandable_segments:False,max_split_size_mb:1048576")


def empty(mb):
    return torch.empty(int(mb * MB), dtype=torch.uint8, device="cuda")


@pytest.fixture
def model(cka_memory):
    owner, others = Owner(), []
    for number in range(160):
        (others if number % 4 else owner.blocks).append(empty(4))
    del others
    return owner


class Owner(torch.nn.Module):
    """Holds a list as an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks = []


def in_list():
    kept = []
    return kept, kept


def in_dict():
    kept = {"blocks": []}
    return kept["blocks"], kept


def in_module():
    kept = Owner()
    return kept.blocks, kept


HOLDERS = {"list": in_list, "dict": in_dict, "module": in_module}


def sizes(mb, late, limit_mb):
    """The limit is above what is in use at once, and below the reserve."""
    return pytest.param(mb, late, marks=pytest.mark.max_reserved_mb(limit_mb), id=str(mb))


@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE])
@pytest.mark.parametrize(
    ("mb", "late"), [sizes(0.5, 10, 650), sizes(4, 10, 800), sizes(6, 15, 1200)]
)
@pytest.mark.parametrize("holder", HOLDERS)
def test_planted_fragments(cka_memory, allocator, settings, mb, late, holder):
    """Of blocks that lie side by side every fourth stays; larger ones do not fit between them."""
    allocator(settings)
    into, kept = HOLDERS[holder]()
    with cka_memory.measure():
        others = []
        for number in range(160):
            if number % 4:
                others.append(empty(mb))
            else:
                into.append(empty(mb))  # kept
        del others
        others = [empty(60) for _ in range(late)]
    assert kept is not None
    assert len(others) == late


@pytest.mark.max_reserved_mb(800)
@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE])
def test_planted_fragments_of_a_stream(cka_memory, allocator, settings):
    """The same on another stream than the default one."""
    allocator(settings)
    stream = torch.cuda.Stream()
    with cka_memory.measure(), torch.cuda.stream(stream):
        kept, others = [], []
        for number in range(160):
            if number % 4:
                others.append(empty(4))
            else:
                kept.append(empty(4))  # kept
        del others
        others = [empty(60) for _ in range(10)]
    assert len(others) == 10


@pytest.mark.max_reserved_mb(1)
def test_planted_older_fragments(model, cka_memory, allocator):
    """What lies between the blocks of an older object is free when the region begins."""
    with cka_memory.measure():
        kept = [empty(60) for _ in range(10)]
    del kept


@reserve
@pytest.mark.parametrize("step", [2, 4, 20])
def test_planted_growing_requests(cka_memory, allocator, step):
    """No request fits a block that is cached, so each takes a new segment."""
    allocator(PLAIN)
    with cka_memory.measure() as region:
        for batch in region.batches(range(1, 18)):
            empty(20 + step * batch)


@reserve
@pytest.mark.parametrize("split", [64, 128])
def test_planted_split_limit(cka_memory, allocator, split):
    """What is joined is too large to be split, and so of no use for smaller requests."""
    allocator(f"max_split_size_mb:{split},expandable_segments:True")
    kept = []
    with cka_memory.measure() as region:
        for _ in region.batches(range(16)):
            blocks = [empty(split / 4 + 2) for _ in range(4)]
            kept = [*kept[-3:], empty(2)]
            del blocks


@reserve
@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE])
def test_planted_new_streams(cka_memory, allocator, settings):
    """What is cached for one stream serves no other."""
    allocator(settings)
    weights = empty(30)
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            with torch.cuda.stream(torch.cuda.Stream()):
                empty(24)
    del weights


@reserve
@pytest.mark.flat_per_batch(of="pools")
def test_planted_graphs(cka_memory, allocator):
    """A graph is captured in each batch, and kept."""
    allocator(PLAIN)
    kept = []
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            kept.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(kept[-1]):
                empty(30)


@reserve
@pytest.mark.max_pools_mb(100)
def test_planted_memory_pools(cka_memory, allocator):
    """A MemPool is made in each batch, and kept."""
    allocator(PLAIN)
    kept = []
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            kept.append(torch.cuda.MemPool())
            with torch.cuda.use_mem_pool(kept[-1]):
                empty(30)


ORDERS = list(itertools.permutations((12, 24, 36, 60)))[::2]


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.parametrize("order", range(len(ORDERS)))
def test_clean_sizes_in_turns(cka_memory, allocator, order):
    """Each size comes again after four batches."""
    allocator(PLAIN)
    with cka_memory.measure() as region:
        for batch in region.batches(range(24)):
            empty(ORDERS[order][batch % 4])


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE])
def test_clean_saw_tooth(cka_memory, allocator, settings, every):
    """The reserve rises for a few batches, then the cache is emptied."""
    allocator(settings)
    with cka_memory.measure() as region:
        for batch in region.batches(range(36)):
            blocks = [empty(20 + 2 * (batch % every)) for _ in range(batch % every + 1)]
            del blocks
            if batch % every == every - 1:
                torch.cuda.empty_cache()


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.parametrize("settings", [PLAIN, EXPANDABLE])
def test_clean_streams_in_turns(cka_memory, allocator, settings):
    """Two streams, each with its own cache."""
    allocator(settings)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    with cka_memory.measure() as region:
        for batch in region.batches(range(16)):
            with torch.cuda.stream(streams[batch % 2]):
                empty(24)


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.flat_per_batch(of="pools")
@pytest.mark.max_pools_mb(64)
def test_clean_graph_that_is_captured_once(cka_memory, allocator):
    """Replays take nothing more."""
    allocator(PLAIN)
    with cka_memory.measure() as region:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            empty(30)
        for _ in region.batches(range(12)):
            graph.replay()


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.flat_per_batch(of="pools")
@pytest.mark.parametrize("kind", ["graph", "pool"])
def test_clean_pool_of_each_batch_that_is_dropped(cka_memory, allocator, kind):
    """What a graph or a MemPool has reserved is free again with it."""
    allocator(PLAIN)
    with cka_memory.measure() as region:
        for _ in region.batches(range(12)):
            if kind == "graph":
                owner = torch.cuda.CUDAGraph()
                with torch.cuda.graph(owner):
                    empty(30)
            else:
                owner = torch.cuda.MemPool()
                with torch.cuda.use_mem_pool(owner):
                    empty(30)
            del owner
            torch.cuda.empty_cache()


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.parametrize("kept_mb", [0.25, 2, 12, 40])
def test_clean_state_that_is_replaced(cka_memory, allocator, kept_mb):
    """The last four states are kept, as in a moving window."""
    allocator(EXPANDABLE)
    kept = []
    with cka_memory.measure() as region:
        for _ in region.batches(range(24)):
            blocks = [empty(34) for _ in range(4)]
            kept = [*kept[-3:], empty(kept_mb)]
            del blocks


@reserve
@pytest.mark.flat_per_batch
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_clean_recorded_on_another_stream(cka_memory, allocator, threads):
    """Blocks that wait for another stream come back."""
    allocator(PLAIN)
    streams = [torch.cuda.Stream() for _ in range(threads)]
    with cka_memory.measure() as region:
        for _ in region.batches(range(16)):
            block = empty(24)
            for stream in streams:
                block.record_stream(stream)
            del block
            torch.cuda.synchronize()


@pytest.mark.max_peak_mb(1)
def test_kinds_of_a_graph(cka_memory, allocator):
    """Of 40 MB at the peak, 30 belong to a graph."""
    allocator(PLAIN)
    with cka_memory.measure():
        other = empty(10)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = empty(30)
    del static, other
