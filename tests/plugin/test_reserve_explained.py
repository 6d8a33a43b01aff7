"""Why a reserve is larger than what is in use: thirty planted causes, and thirty clean loops."""

from pathlib import Path

import pytest

from emulated_cuda.torch_versions import allocator_variable

SOURCE = Path(__file__).with_name("reserve_programs.py").read_text("utf-8")
KEPT_AT = {
    f"test_it.py:{number}"
    for number, line in enumerate(SOURCE.splitlines(), 1)
    if line.endswith("# kept")
}
pytestmark = [pytest.mark.emulates, pytest.mark.slow]


@pytest.fixture
def run(session, finished_sessions, monkeypatch):
    """Return the finished session of all programs on the emulated card."""
    if not finished_sessions:
        monkeypatch.setenv("COLUMNS", "200")
        options = "--cka-memory-device=emulate:cuda:h100,values=off", "--cka-memory-report"
        finished_sessions["run"] = session(SOURCE, *options, "-p", "no:randomly", forked=True)
    return finished_sessions["run"]


def regions_of(run, begin):
    found = [
        it for it in run.report["regions"] if it["nodeid"].partition("::")[2].startswith(begin)
    ]
    assert found
    return found


def unusable(region):
    """Return what cannot be released by the figures of the allocator alone."""
    return region["reserved_after_cleaning_bytes"] - region["end_bytes"]


def test_every_planted_cause_is_found(run):
    planted = regions_of(run, "test_planted")
    assert len(planted) == 30
    assert [it["nodeid"] for it in planted if it["verdict"] != "BREACH"] == []
    assert [it["nodeid"] for it in planted if not (it["reserve"] or it["pools"])] == []


def test_no_clean_loop_is_accused(run):
    clean = regions_of(run, "test_clean")
    assert len(clean) == 30
    assert [
        (it["nodeid"], it["breaches"], it["unjudged"]) for it in clean if it["verdict"] != "ok"
    ] == []


def test_parts_of_each_reserve_add_up(run):
    for region in run.report["regions"]:
        for part in region["reserve"]:
            names = ("in_use", "rounding", "waiting", "free_whole", "free_part")
            assert part["reserved_bytes"] == sum(part[f"{name}_bytes"] for name in names)


def test_what_cannot_be_released_is_exact_and_kept_by_the_planted_blocks(run):
    """The allocator releases all but that when the region is cleaned."""
    regions = regions_of(run, "test_planted_fragments")
    for region in regions + regions_of(run, "test_planted_older_fragments"):
        assert sum(part["free_part_bytes"] for part in region["reserve"]) == unusable(region) > 0
        keeper = region["reserve_kept_by"][0]
        if "True" in region["nodeid"]:  # the last page of an expandable segment has late blocks too
            assert 0.9 * unusable(region) < keeper["keeps_bytes"] <= unusable(region)
        else:
            assert keeper["keeps_bytes"] == unusable(region), region["nodeid"]
        assert region["reserve_moment"] == "at the end"
        if "older" in region["nodeid"]:
            assert (keeper["before_region"], keeper["held_by"]) == (
                True,
                "model.blocks[0] (a fixture)",
            )
        else:
            assert {frame.partition(" in ")[0] for frame in keeper["created_at"]} & KEPT_AT
            assert keeper["held_by"].partition(" ")[0] in {"into[0]", "kept[0]"}
        (breach,) = region["breaches"]
        assert breach["figure"] == "reserved_increase_bytes"


def test_memory_of_a_graph_is_a_kind_at_the_peak(run):
    (region,) = regions_of(run, "test_kinds_of_a_graph")
    kinds = {holding["kind"]: holding["bytes"] for holding in region["at_peak"]}
    assert kinds.pop("other", 0) <= 1024  # what torch 2.9 keeps for random numbers
    assert kinds == {"graph pools": 30 * 2**20, "inputs": 10 * 2**20}


@pytest.mark.parametrize(
    ("begin", "advice"),
    [
        ("test_planted_fragments", "allocate the tensors that stay before those"),
        ("test_planted_growing_requests", "set PYTORCH_ALLOC_CONF=expandable_segments:True, so"),
        ("test_planted_split_limit", "leave max_split_size_mb out of PYTORCH_ALLOC_CONF"),
        ("test_planted_new_streams", "allocate on one stream, or call torch.cuda.empty_cache()"),
        ("test_planted_graphs", "delete every graph of the private pool"),
        ("test_planted_memory_pools", "delete every graph of the private pool"),
    ],
)
def test_message_advises_on_the_planted_cause(run, begin, advice):
    """Each failure of these programs has the advice, and none has that of another cause."""
    failures = run.text.partition("= FAILURES =")[2].partition("short test summary info")[0]
    texts = [text for text in failures.split("\n___") if text.lstrip("_ ").startswith(begin)]
    assert len(texts) == len(regions_of(run, begin))
    advice = advice.replace("PYTORCH_ALLOC_CONF", allocator_variable())
    for text in texts:
        words = " ".join(text.split())
        assert f"what to do: {advice}" in words, text
        others = words.replace(f"what to do: {advice}", "")
        assert "what to do: " not in others or "pools" in begin or "graphs" in begin
