"""The explanation of a breach: groups of similar tensors, retained, growing or at the peak."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from planted import KEEP, cleaned_up

from pytest_cka_memory import Holding, MemoryProbe, Region, RegionRecord
from pytest_cka_memory.core.allocations import AllocationGroup, AllocationSite
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.holders.groups import Entry, group_by_site, grouped
from pytest_cka_memory.limits import Limit, flat_per_batch, max_peak_mb, zero_retention
from pytest_cka_memory.meters.selection import meter_for
from pytest_cka_memory.reports import failure


class FixedFigures:
    """An explainer that asks for the given figures, as limits do."""

    def __init__(self, *figures: str) -> None:
        self.figures = figures

    draws_paths = False

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return self.figures

    def named_values(self) -> Mapping[str, Any]:
        return {}


GROWTH = FixedFigures("growth_bytes_per_batch")
PEAK = FixedFigures("peak_increase_bytes")


@pytest.fixture(autouse=True)
def _clean():
    with cleaned_up():
        yield


def text_of(region: Region, *limits: Limit) -> list[str]:
    """The lines that a failing test prints."""
    result = judge("test_it.py::test_it", region.record, limits)
    return failure.render([result], meter_for("cpu").facts()).splitlines()


def sizes(holdings: tuple[Holding, ...]) -> list[tuple[int, int]]:
    return [(holding.bytes, holding.count) for holding in holdings]


class TestRetained:
    def test_many_tensors_in_one_dict_are_one_group(self) -> None:
        """Tensors in one dict are one group: their bytes are summed, the largest one's path is
        shown.
        """
        with MemoryProbe("cpu").measure() as region:
            KEEP.append({f"layer{number}": torch.ones(number) for number in range(1, 63)})
        (group,) = region.retained
        assert (group.bytes, group.count) == (4 * 62 * 63 // 2, 62)
        assert group.shape == (62,)
        assert group.held_by == "planted.KEEP[0]['layer62']"
        assert group.batches is None

    def test_groups_differ_by_line_and_by_holder(self) -> None:
        """Groups are told apart by line and by holder, and the largest comes first."""
        other = []
        with MemoryProbe("cpu").measure() as region:
            for _ in range(3):
                KEEP.append(torch.ones(10))
                other.append(torch.ones(20))
            for where in (KEEP, other):
                where.append(torch.ones(100))
        assert sizes(region.retained) == [(400, 1), (400, 1), (240, 3), (120, 3)]
        paths = [str(holding.held_by).partition(" in ")[0] for holding in region.retained]
        assert paths == ["planted.KEEP[3]", "other[3]", "other[0]", "planted.KEEP[0]"]

    def test_tensors_freed_after_the_region_are_left_out(self) -> None:
        """Groups contain only what is still live when they are read."""
        with MemoryProbe("cpu").measure() as region:
            KEEP.extend([torch.ones(10), torch.ones(20)])
        KEEP.pop()
        assert sizes(region.retained) == [(40, 1)]
        assert region.retained_bytes == 120

    def test_a_record_with_groups_survives_json(self) -> None:
        """A record is written as JSON and read again, and every field of its groups is equal."""
        with MemoryProbe(
            "cpu", explainer=FixedFigures("retained_bytes", *PEAK.figures)
        ).measure() as r:
            KEEP.append({"x": torch.ones(10), 3: torch.ones(20)})
        assert r.record.retained
        assert r.record.at_peak
        again = RegionRecord.from_dict(json.loads(json.dumps(r.record.to_dict())))
        assert again == r.record


class TestGrowth:
    def test_growth_is_grouped_with_the_number_of_batches_that_allocated(self) -> None:
        """Growth is listed with its number of batches; what was allocated once is not growth."""
        with MemoryProbe("cpu", explainer=GROWTH).measure() as region:
            KEEP.append(torch.ones(1000))
            for number in range(16):
                KEEP.append(torch.ones(10))
                if number % 2:
                    KEEP.append((torch.ones(5), torch.ones(5)))
                region.batch_done(4)
        grown = region.record.grown
        assert sizes(grown) == [(640, 16), (320, 16)]
        assert [group.batches for group in grown] == [16, 8]

    def test_growth_is_explained_if_the_loop_frees_it_at_its_end(self) -> None:
        """Growth is explained at the batch boundary where it is
        detected, before the loop frees it.
        """

        def loop(region: Region) -> None:
            losses = []
            for _ in range(16):
                losses.append(torch.ones(10))
                region.batch_done(4)

        limit = flat_per_batch()
        with MemoryProbe("cpu", explainer=BrokenFigures(limit)).measure() as region:
            loop(region)
        assert region.retained_bytes == 0
        (group,) = region.record.grown
        assert "losses[" in str(group.held_by)
        assert "/test_groups.py:" in str(group.held_by)
        text = "\n".join(text_of(region, limit))
        assert (group.batches, group.first_batches) == (6, 6)
        assert "allocated in 6 of the first 6 batches" in text
        assert "explains 40 of 40 B per batch" in text
        assert "above the first batch" in text

    @pytest.mark.parametrize("is_freed", [False, True], ids=["kept", "freed-at-the-end"])
    def test_what_is_rebuilt_larger_in_each_batch_is_named(self, is_freed: bool) -> None:
        """A tensor that each batch replaces by a larger one grows, although none is kept."""

        def loop(region: Region) -> torch.Tensor:
            state = torch.zeros(0)
            for _ in range(16):
                state = torch.cat([state, torch.zeros(1000)])
                region.batch_done(4)
            return state

        limit = flat_per_batch()
        with MemoryProbe("cpu", explainer=BrokenFigures(limit)).measure() as region:
            state = loop(region)
            if is_freed:
                del state
        (group,) = region.record.grown
        code = str(group.code).removeprefix("state = ")  # of the whole line, in Python 3.10
        assert code == "torch.cat([state, torch.zeros(1000)])"
        assert group.early_bytes == 8000
        assert (group.bytes, group.count) == (24_000 if is_freed else 64_000, 1)
        assert str(group.held_by).startswith("state in ")
        text = " ".join("\n".join(text_of(region, limit)).split())
        now = "0.02 MB" if is_freed else "0.06 MB"
        assert f"grows from 7.8 KB after 2 batches to {now}" in text
        assert "each batch replaces `state` by a larger one" in text


class BrokenFigures(FixedFigures):
    """An explainer that asks for the figures that break a limit, as a test does."""

    def __init__(self, *limits: Limit) -> None:
        self.limits = limits

    def figures_to_explain(self, record: RegionRecord) -> Collection[str]:
        return {breach.figure for breach in judge("", record, self.limits).breaches}


class TestPeak:
    def test_the_largest_groups_at_the_peak_are_listed(self) -> None:
        """The groups at the peak have lines; what was freed before
        or allocated later is left out.
        """
        with MemoryProbe("cpu", explainer=PEAK).measure() as region:
            before = torch.ones(450)
            del before
            first = torch.ones(100), torch.ones(100)
            second = torch.ones(300)
            del first, second
            after = torch.ones(400)
            del after
        made = [group for group in region.record.at_peak if group.created_at]
        assert region.peak_increase_bytes == 2000
        assert sizes(tuple(made)) == [(1200, 1), (800, 2)]
        assert all("test_the_largest_groups" in group.created_at[0] for group in made)

    def test_a_peak_between_two_batch_boundaries_is_explained(self) -> None:
        """A boundary between batches reads the level, which must
        not hide a higher peak before it.
        """
        with MemoryProbe("cpu", explainer=PEAK).measure() as region:
            for number in range(4):
                short = torch.ones(1000 if number == 1 else 10)
                del short
                region.batch_done()
        made = [group for group in region.record.at_peak if group.created_at]
        assert sizes(tuple(made)) == [(4000, 1)]

    @pytest.mark.native
    def test_a_peak_inside_an_inner_region_is_explained_in_both_regions(self) -> None:
        """An inner region's peak is explained in both regions, although it resets the device's
        peak. In the inner one, what the outer one allocated is live before the region.
        """
        probe = MemoryProbe("cpu", explainer=PEAK)
        with probe.measure() as outer:
            kept = torch.ones(100)
            with probe.measure() as inner:
                short = torch.ones(1000)
                del short
            assert kept is not None
        for region, expected in ((outer, [(4000, 1), (400, 1)]), (inner, [(4000, 1)])):
            made = [group for group in region.record.at_peak if group.created_at]
            assert sizes(tuple(made)) == expected
        before = inner.record.at_peak[-1]
        assert before.before_region
        assert before.bytes == inner.record.start_bytes >= 400

    @pytest.mark.native
    def test_memory_from_before_the_region_is_listed_as_such(self) -> None:
        """Memory from before a region is one group without lines, because they are not known."""
        KEEP.append(torch.ones(100_000))
        with MemoryProbe("cpu", explainer=PEAK).measure() as region:
            KEEP.append(torch.ones(10))
        lines = text_of(region, max_peak_mb("1 B"))
        assert any("live before the region" in line for line in lines)
        assert any("live at the peak" in line for line in lines)


class At:
    """A site that is recorded in readable form."""

    def __init__(self, line: int, code: str | None = None, operator: str | None = None) -> None:
        self.site = AllocationSite((f"net.py:{line} in forward",), code, operator)

    def readable(self) -> AllocationSite:
        return self.site


class TestGroupsAtThePeak:
    def test_groups_of_one_line_and_one_expression_are_merged(self) -> None:
        """Groups are merged only if line, expression and operator are the same."""
        made = [
            AllocationGroup(10, 1, At(1, "a * b")),
            AllocationGroup(70, 3, At(1, "a + b")),
            AllocationGroup(20, 2, At(1, "a * b")),
            AllocationGroup(40, 1, At(1, "a * b", "aten.mul")),
            AllocationGroup(50, 1, At(2, "a * b")),
            AllocationGroup(5, 1, None),
        ]
        found = group_by_site(made)
        assert sizes(found) == [(70, 3), (50, 1), (40, 1), (30, 3), (5, 1)]
        assert [group.code for group in found] == ["a + b", "a * b", "a * b", "a * b", None]

    def test_what_was_live_before_the_region_is_one_group_the_last(self) -> None:
        """Memory from before the region is one group, which is listed last, whatever its size and
        line.
        """
        made = [
            AllocationGroup(1000, 2, At(1), before_region=True),
            AllocationGroup(2000, 3, None, before_region=True),
            AllocationGroup(10, 1, At(1)),
        ]
        found = group_by_site(made)
        assert sizes(found) == [(10, 1), (3000, 5)]
        assert [group.before_region for group in found] == [False, True]
        assert found[1] == Holding(bytes=3000, count=5, before_region=True)

    def test_memory_that_no_tensor_owned_is_named(self) -> None:
        """Memory without a tensor is a group of its own, not merged with tensors of its line."""
        made = [
            AllocationGroup(100, 2, At(1, "x @ x")),
            AllocationGroup(300, 1, At(1, "x @ x"), inside="workspace"),
        ]
        found = group_by_site(made)
        assert sizes(found) == [(300, 0), (100, 2)]
        assert [group.inside for group in found] == ["workspace", None]
        lines = list(failure.holding_lines(found[0], traced=False))
        assert lines == ["  300 bytes, workspace", "    made at net.py:1 in forward: `x @ x`"]

    def test_the_group_from_before_the_region_is_always_shown(self) -> None:
        """The group from before the region comes after the line that counts the smaller groups."""
        made = [AllocationGroup(100 - line, 1, At(line)) for line in range(6)]
        before = AllocationGroup(5_000_000, 7, None, before_region=True)
        at_peak = group_by_site([before, *made])
        record = RegionRecord(
            label="",
            completed=True,
            start_bytes=0,
            end_bytes=0,
            peak_bytes=6_000_000,
            retained_bytes=0,
            at_peak=at_peak,
        )
        result = judge("t", record, [max_peak_mb("1 B")])
        text = failure.render([result], meter_for("cpu").facts()).splitlines()
        first = text.index("  and 2 smaller groups, 191 bytes")
        assert text[first + 1 : first + 5] == [
            "  7 allocations, 5,000,000 bytes (4.77 MB), live before the region",
            *text[first + 2 : first + 4],
            "  explains 4.77 of 5.72 MB; it is not known where the rest was allocated",
        ]


class TestText:
    def test_the_expression_follows_the_innermost_frame(self) -> None:
        """A group's expression is shown after its innermost frame and before the calling frames."""
        holding = Holding(
            bytes=2**20,
            count=2,
            dtype="float32",
            shape=(512, 256),
            created_at=("train.py:12 in step", "train.py:40 in fit"),
            code="(weight * batch).sum()",
            held_by="KEEP[0]",
        )
        assert list(failure.holding_lines(holding)) == [
            "  2 tensors, 1,048,576 bytes (1.00 MB), float32 largest (512, 256)",
            "    made at train.py:12 in step: `(weight * batch).sum()`, from train.py:40 in fit",
            "    held by KEEP[0]",
        ]

    def test_one_leak_takes_at_most_30_lines_of_100_columns(self) -> None:
        """A leak takes at most 30 lines of 100 columns, whatever the
        lengths of its path and names.
        """
        name = "a_name_that_goes_on_and_on" * 9
        with MemoryProbe("cpu").measure() as region:
            KEEP.append({name: [[{(name, 1): [torch.ones(10)]}]]})
            for _ in range(5):
                KEEP.append(torch.ones(3))
        assert region.retained
        lines = text_of(region, zero_retention())
        assert len(lines) <= 30
        assert max(map(len, lines)) <= 100

    def test_advice_is_wrapped_to_100_columns(self) -> None:
        """All advice is wrapped to 100 columns, even the longest, for tensors that C++ holds."""
        weight = torch.nn.Linear(5, 50)
        with torch.autocast("cpu", torch.bfloat16):
            with MemoryProbe("cpu").measure() as region:
                weight(torch.zeros(0, 5))
            assert region.retained[0].held_by is None
        lines = text_of(region, zero_retention())
        assert max(map(len, lines)) <= 100
        assert any(
            "no Python object was found that keeps this memory alive" in line for line in lines
        )

    def test_a_long_file_name_is_wrapped(self) -> None:
        """A file name that is longer than a line is broken."""
        holding = Holding(
            bytes=4,
            count=1,
            dtype="float32",
            shape=tuple(range(1, 40)),
            operator="aten.ones",
            created_at=(f"{'folder' * 30}/file.py:1 in f",) * 6,
            held_by="KEEP" * 60,
        )
        lines = list(failure.holding_lines(holding))
        assert max(map(len, lines)) <= 100
        assert len(lines) <= 20

    def test_a_long_path_is_wrapped_before_dots_and_brackets(self) -> None:
        """A path of expressions is wrapped only before dots and brackets."""
        path = "model." + ".".join(f"encoder_layer_{number}" for number in range(12)) + "[3].weight"
        holding = Holding(bytes=4, count=1, held_by=path)
        lines = [line.strip() for line in failure.holding_lines(holding)]
        assert len(lines) == 4
        assert "".join(lines[1:]) == f"held by {path}"
        assert all(line.startswith((".", "[")) for line in lines[2:])


@pytest.mark.parametrize(
    ("paths", "created_at"),
    [
        ([("a", "b", "c")], ("a", "b", "c")),
        ([("a", "b", "c"), ("a", "b", "c")], ("a", "b", "c")),
        ([("a", "b", "c"), ("a", "d", "c")], ("a", "b and 1 other line")),
        ([("a", "b", "c"), ("a", "d", "c"), ("a",)], ("a", "b and 1 other line")),
        ([("a", "b", "c"), ("a", "d", "c"), ("a", "e")], ("a", "b and 2 other lines")),
        ([("a", "b", "c"), ("a", "b", "d")], ("a", "b", "c and 1 other line")),
        ([("a",), ("a", "b")], ("a",)),
    ],
)
def test_group_names_its_callers_up_to_where_they_differ(
    paths: list[tuple[str, ...]], created_at: tuple[str, ...]
) -> None:
    """The largest is named, with the number of others, instead of it alone as if it were all."""
    entries = [
        Entry(Holding(bytes=10 - number, count=1, created_at=path), ("line",))
        for number, path in enumerate(paths)
    ]
    (holding,) = grouped(entries)
    assert holding.created_at == created_at
