"""A pull request's story: a baseline, a regression of 6 % that the gate stops, and its repair."""

NET = """
import torch

CACHE, DEBUG = [], []

def embed(count):
    rows = [torch.ones(250) for _ in range(count)]  # 1,000 bytes each
    CACHE.extend(rows[:100])
    DEBUG.extend(rows[100:])
"""
TEST = """
import net

def test_embedding(cka_memory):
    with cka_memory.measure("embed"):
        net.embed({count})
"""
GATE = (
    "--cka-memory-device=cpu",
    "--cka-memory-baseline=memory.json",
    "--cka-memory-tolerance=5%",
    "--cka-memory-require-baseline",
    "--cka-memory-markdown=summary.md",
)


def test_a_regression_is_stopped_until_it_is_repaired(session, pytester):
    """The gate names the figure and who holds the bytes, wherever a reviewer looks."""
    pytester.makepyfile(net=NET)
    baseline, summary = pytester.path / "memory.json", pytester.path / "summary.md"

    # On the main branch, once: committed.
    session(TEST.format(count=100), *GATE, "--cka-memory-update-baseline").outcomes(passed=1)
    committed = baseline.read_text("utf-8")
    assert '"label": "embed"' in committed
    assert '"retained_bytes": 100000' in committed

    # The pull request holds on to 6 % more.
    run = session(TEST.format(count=106), *GATE)
    run.outcomes(failed=1)
    said = " ".join(run.text.split())  # unfolded
    assert (
        "--cka-memory-baseline broken: retained 106,000 bytes (0.10 MB), allowed 105,000 bytes "
        "(0.10 MB) (5% above the baseline's 100,000 bytes (0.10 MB)): 1,000 bytes too much "
        "in region 'embed', on cpu by exact accounting of tensor storages"
    ) in said
    assert "6 tensors, 6,000 bytes, float32 largest (250,) by aten.ones made at" in said
    assert "held by net.DEBUG[0]" in said
    figures = {breach["figure"] for breach in run.region["breaches"]}
    assert figures == {"peak_increase_bytes", "retained_bytes"}
    # What else a reviewer sees of it: every surface of the CI is asserted on here.
    assert "retained 106,000 bytes" in summary.read_text("utf-8")

    # Repaired: it passes, and no one has touched the baseline.
    session(TEST.format(count=100), *GATE).outcomes(passed=1)
    assert "106,000" not in summary.read_text("utf-8")
    assert baseline.read_text("utf-8") == committed
