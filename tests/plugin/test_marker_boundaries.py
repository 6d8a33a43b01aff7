"""Each marker at its exact boundary."""

import re

import pytest

MB = 2**20
RETAIN = """
import pytest

@pytest.mark.{marker}
def test_retains(meter):
    meter.allocate({size})
"""
PEAK = """
import pytest

@pytest.mark.{marker}
def test_peaks(meter):
    meter.free(meter.allocate({size}))
"""
GROW = """
import pytest

@pytest.mark.{marker}
def test_grows(cka_memory, meter):
    with cka_memory.measure("loop") as region:
        for _ in range({batches}):
            meter.allocate({size})
            region.batch_done({batch_size})
"""


@pytest.mark.parametrize(
    ("marker", "size", "kept"),
    [
        pytest.param("max_retained_mb(1)", MB - 1, True, id="one-byte-below"),
        pytest.param("max_retained_mb(1)", MB, True, id="equal"),
        pytest.param("max_retained_mb(1)", MB + 1, False, id="one-byte-above"),
        pytest.param("max_retained_mb(limit=1.5)", MB * 3 // 2, True, id="keyword-equal"),
        pytest.param("max_retained_mb('4 B')", 4, True, id="text-equal"),
        pytest.param("max_retained_mb('4 B')", 5, False, id="text-one-byte-above"),
        pytest.param("max_retained_mb(0)", 1, False, id="zero-one-byte-above"),
        pytest.param("zero_retention", 0, True, id="zero-retention-equal"),
        pytest.param("zero_retention", 1, False, id="zero-retention-one-byte"),
        pytest.param("zero_retention()", 1, False, id="zero-retention-called"),
    ],
)
def test_retained_bytes_at_the_limit_keep_it_and_one_more_breaks_it(scripted, marker, size, kept):
    """A test that retains exactly its limit passes, and one more byte fails it."""
    run = scripted(RETAIN.format(marker=marker, size=size))
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    assert run.region["retained_bytes"] == size
    assert run.region["verdict"] == ("ok" if kept else "BREACH")


@pytest.mark.parametrize(
    ("size", "kept"),
    [(2 * MB, True), (2 * MB + 1, False)],
    ids=["equal", "one-byte-above"],
)
def test_peak_increase_at_the_limit_keeps_it(scripted, size, kept):
    """A peak increase equal to its limit passes; what was live before does not count in it."""
    before = "import pytest\n@pytest.fixture(autouse=True)\ndef old(meter): meter.allocate(10**9)\n"
    run = scripted(before + PEAK.format(marker="max_peak_mb(2)", size=size))
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    assert run.region["peak_increase_bytes"] == size
    assert run.region["start_bytes"] == 10**9
    assert run.region["retained_bytes"] == 0


@pytest.mark.parametrize(
    ("size", "kept"), [(MB, True), (MB + 1, False)], ids=["equal", "one-byte-above"]
)
def test_level_at_the_limit_keeps_it(scripted, size, kept):
    """A level equal to its limit passes; it counts what was live
    before, as torch's maximum does.
    """
    before = f"import pytest\n@pytest.fixture(autouse=True)\ndef old(meter): meter.allocate({MB})\n"
    run = scripted(before + PEAK.format(marker="max_level_mb(2)", size=size))
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    assert (run.region["start_bytes"], run.region["peak_bytes"]) == (MB, MB + size)


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "ledger"])
def test_broken_level_lists_what_was_live_before_and_what_the_region_allocated(
    session, monkeypatch, native
):
    """A broken level lists older memory and the region's; the advice is on the larger part."""
    monkeypatch.setenv("CKA_MEMORY_NATIVE", native)
    run = session(
        """
        import pytest
        import torch

        @pytest.mark.max_level_mb(5)
        @pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)], ids=["before", "inside"])
        def test_it(cka_memory, old, new):
            kept = torch.empty(old * 2**20, dtype=torch.uint8)
            with cka_memory.measure("use"):
                torch.empty(new * 2**20, dtype=torch.uint8)
        """,
        "--cka-memory-device=cpu",
        forked=True,
    )
    run.assert_outcomes(failed=2)
    text = " ".join(run.text.split())
    for old, new in ((4, 2), (2, 4)):
        parts = f"it was {old * MB:,} bytes ({old}.00 MB) at the start of the region, which added"
        assert f"{parts} {new * MB:,} bytes ({new}.00 MB)" in text
        assert re.search(rf"live at the peak:.* {old * MB:,} bytes \({old}.00 MB\)", text)
    first, second = text.split("[inside]")[:2]
    assert "most of the peak was in use before the region" in first
    assert "the region allocates most of the peak" in second
    assert text.count("`torch.empty(new * 2**20, dtype=torch.uint8)`") == 2


@pytest.mark.parametrize(
    ("size", "kept"), [(MB, True), (MB + 1, False)], ids=["equal", "one-byte-above"]
)
def test_reserve_at_the_limit_keeps_it(scripted_reserve, size, kept):
    """On a device with a reserve, an increase in the region equal to the limit passes."""
    run = scripted_reserve(PEAK.format(marker="max_reserved_mb(1)", size=size))
    run.assert_outcomes(passed=int(kept), failed=int(not kept))
    region = run.region
    assert region["reserved_peak_bytes"] - region["reserved_start_bytes"] == size
    assert region["reserved_end_bytes"] == size
    assert region["reserved_after_cleaning_bytes"] == 0


@pytest.mark.parametrize("options", [(), ("--cka-memory-report",)], ids=["plain", "report"])
def test_reserve_limit_without_a_reserve_is_reported_as_not_judged(scripted, options):
    """A limit that cannot be judged on this device passes, and the report says so."""
    run = scripted(PEAK.format(marker="max_reserved_mb(1)", size=2 * MB), *options)
    run.assert_outcomes(passed=1)
    assert run.region["verdict"] == "not judged"
    assert run.region["reserved_peak_bytes"] is None
    assert run.region["unjudged"] == [
        {"limit": "max_reserved_mb(1)", "reason": "this device has no reserve"}
    ]
    run.result.stdout.fnmatch_lines(["*max_reserved_mb(1)*this device has no reserve*"])
    assert "not judged" in run.text


def test_reserve_limit_not_judged_is_printed_without_options(scripted):
    """The terminal says that a limit was not judged, even without --cka-memory-report."""
    source = PEAK.format(marker="max_reserved_mb(1)", size=2 * MB)
    run = scripted(source, writes_json=False)
    run.assert_outcomes(passed=1)
    run.result.stdout.fnmatch_lines(["*max_reserved_mb(1)*this device has no reserve*"])
    assert "not judged" in run.text


def test_leak_of_four_bytes_per_batch_is_reported_exactly(scripted):
    """The smallest leak, one float per batch, is reported as 4.0 bytes."""
    run = scripted(GROW.format(marker="flat_per_batch", batches=16, size=4, batch_size=8))
    run.assert_outcomes(failed=1)
    assert run.region["growth_bytes_per_batch"] == 4.0
    run.result.stdout.fnmatch_lines(["*flat_per_batch*grew by 4 bytes per batch over 16 batches*"])


@pytest.mark.parametrize(
    ("marker", "size", "batches", "kept"),
    [
        pytest.param("flat_per_batch('1 KiB')", 1024, 5, True, id="equal"),
        pytest.param("flat_per_batch('1 KiB')", 1025, 5, False, id="one-byte-above"),
        pytest.param("flat_per_batch(tolerance_mb=1)", MB, 8, True, id="mb-equal"),
        pytest.param("flat_per_batch(1, 0)", MB + 1, 4, False, id="positional-above"),
        pytest.param("flat_per_batch(warmup=3)", 0, 7, True, id="flat-after-longer-warmup"),
    ],
)
def test_growth_at_the_tolerance_keeps_it(scripted, marker, size, batches, kept):
    """Growth per batch equal to the tolerance passes."""
    run = scripted(GROW.format(marker=marker, size=size, batches=batches, batch_size=8))
    run.assert_outcomes(passed=int(kept), failed=int(not kept))


@pytest.mark.parametrize(
    ("marker", "batches", "advice"),
    [
        ("flat_per_batch", 0, "no batch was seen: loop over region.batches(loader)"),
        ("flat_per_batch", 4, "4 full batches were seen and 5 are needed"),
        ("flat_per_batch(warmup=3)", 5, "5 full batches were seen and 7 are needed"),
    ],
    ids=["none", "one-too-few", "too-few-for-the-warmup"],
)
def test_too_few_batches_fail_and_say_what_to_do(scripted, marker, batches, advice):
    """Too few batches to judge growth fail the test, with what to do about it."""
    run = scripted(GROW.format(marker=marker, batches=batches, size=0, batch_size=8))
    run.assert_outcomes(failed=1)
    assert advice in " ".join(run.text.split())
    assert run.region["breaches"][0]["measured_bytes"] is None


def test_flat_per_batch_without_a_region_fails(scripted):
    """A test without a region has no batches, so ``flat_per_batch`` fails."""
    run = scripted(RETAIN.format(marker="flat_per_batch", size=0))
    run.assert_outcomes(failed=1)
    assert "call region.batch_done() after each batch" in " ".join(run.text.split())


def test_every_broken_limit_is_named(scripted):
    """One failure names every broken limit, with what was measured and what is allowed."""
    run = scripted(
        """
        import pytest

        @pytest.mark.max_retained_mb(1)
        @pytest.mark.max_peak_mb("2 MB")
        @pytest.mark.flat_per_batch
        @pytest.mark.max_reserved_mb(1)
        def test_all(cka_memory, meter):
            with cka_memory.measure("train") as region:
                for _ in range(6):
                    meter.allocate(2**20)
                    region.batch_done(4)
        """
    )
    run.assert_outcomes(failed=1)
    broken = [breach["limit"] for breach in run.region["breaches"]]
    assert broken == ["max_retained_mb(1)", "max_peak_mb('2 MB')", "flat_per_batch"]
    run.result.stdout.fnmatch_lines_random(
        [
            "max_retained_mb(1) broken: retained 6,291,456 bytes (6.00 MB), allowed 1,048,576*",
            "max_peak_mb('2 MB') broken: peak increase 6,291,456 bytes (6.00 MB), allowed*",
            "flat_per_batch broken: grew by 1,048,576 bytes (1.00 MB) per batch over 6 batches*",
            "*region 'train'*",
        ]
    )
    assert "pytest_cka_memory/" not in run.text  # no traceback of the plugin
    assert "Traceback" not in run.text


def test_limits_apply_to_every_region(scripted):
    """Limits apply to every region: the second of three breaks one, and the failure names it."""
    run = scripted(
        """
        import pytest

        @pytest.mark.zero_retention
        def test_three(cka_memory, meter):
            for size in (0, 7, 0):
                with cka_memory.measure("step"):
                    if size:
                        meter.allocate(size)
        """
    )
    run.assert_outcomes(failed=1)
    assert [r["label"] for r in run.regions] == ["step", "step #2", "step #3"]
    assert [r["verdict"] for r in run.regions] == ["ok", "BREACH", "ok"]
    run.result.stdout.fnmatch_lines(["*region 'step #2'*"])
