"""At which moment a reserve is explained: at its highest, also if nothing of it is left later."""

import pytest

PROGRAM = """
    import pytest, torch

    MB = 2**20

    def grow():
        kept = []
        for step in range(20):
            large = torch.empty((34 + 2 * step) * MB, dtype=torch.uint8, device="cuda")
            kept.append(torch.empty(2 * MB, dtype=torch.uint8, device="cuda"))
            del large
        return kept

    pytestmark = pytest.mark.max_reserved_mb(100)

    def test_emptied_with_boundaries(cka_memory):
        with cka_memory.measure() as region:
            for batch in range(6):
                now = torch.empty(60 * MB, dtype=torch.uint8, device="cuda")
                region.batch_done()
                if batch == 3:
                    kept = grow()
                    del kept, now
                    torch.cuda.empty_cache()

    def test_emptied(cka_memory):
        with cka_memory.measure():
            kept = grow()
            del kept
            torch.cuda.empty_cache()

    def test_emptied_for_any_device(cka_memory):
        with cka_memory.measure():
            kept = grow()[:4]
            torch.accelerator.empty_cache()

    def test_emptied_by_an_inner_region(cka_memory):
        with cka_memory.measure("outer"):
            kept = grow()[:4]
            with cka_memory.measure("inner"):
                pass

    def test_emptied_unseen(cka_memory):
        with cka_memory.measure():
            kept = grow()[:4]
            torch._C._cuda_emptyCache()  # as the allocator does it when the card is full

    def test_emptied_unseen_wholly(cka_memory):
        with cka_memory.measure():
            kept = grow()
            del kept
            torch._C._cuda_emptyCache()

    def test_emptied_after_a_boundary(cka_memory):
        with cka_memory.measure() as region:
            kept = grow()
            region.batch_done()
            kept = kept[:4]
            torch._C._cuda_emptyCache()
"""
OPTIONS = ("--cka-memory-device=emulate:cuda:h100,values=off", "-p", "no:randomly")
UNSEEN = "call region.batch_done() while the reserved memory is high, so that it can be explained"
pytestmark = pytest.mark.emulates


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    if not finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        finished_sessions["run"] = session(PROGRAM, *OPTIONS, forked=True)
    return finished_sessions["run"]


def text_of(run, name):
    failures = run.text.partition("= FAILURES =")[2].partition("short test summary info")[0]
    (text,) = (it for it in failures.split("\n___") if it.lstrip("_ ").startswith(f"{name} "))
    return " ".join(text.split())


def region_of(run, name):
    found = [it for it in run.report["regions"] if it["nodeid"].endswith(f"::{name}")]
    return max(found, key=lambda it: it["reserved_peak_bytes"] - it["reserved_start_bytes"])


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("test_emptied_with_boundaries", "before the cache was emptied"),
        ("test_emptied", "before the cache was emptied"),
        ("test_emptied_for_any_device", "before the cache was emptied"),
        ("test_emptied_by_an_inner_region", "before the cache was emptied"),
        ("test_emptied_after_a_boundary", "after batch 1"),
    ],
)
def test_reserve_is_explained_where_it_was_highest(run, name, moment):
    region = region_of(run, name)
    explained = sum(part["reserved_bytes"] for part in region["reserve"])
    assert region["reserve_moment"] == moment
    assert explained == region["reserved_peak_bytes"]
    assert "free blocks do not fit requests of other sizes" in text_of(run, name)
    assert UNSEEN not in text_of(run, name)


def test_message_says_that_the_highest_moment_was_not_seen(run):
    text = text_of(run, "test_emptied_unseen")
    assert "at the end: of 20.00 MB reserved, 8.00 MB in use" in text
    assert "the highest reserve was 1080.00 MB, at another moment; its parts are not known" in text
    assert text.count("what to do: ") == 1
    assert f"what to do: {UNSEEN} at that moment" in text


def test_message_says_that_nothing_was_left_to_look_at(run):
    assert region_of(run, "test_emptied_unseen_wholly")["reserve"] == []
    text = text_of(run, "test_emptied_unseen_wholly")
    assert "call region.batch_done() while the reserved memory is high, on a device" in text
