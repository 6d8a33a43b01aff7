"""The result of a sweep: one region per batch count."""

from dataclasses import dataclass

from pytest_cka_memory.core.figures import shown_columns
from pytest_cka_memory.errors import RegionError
from pytest_cka_memory.measure import display
from pytest_cka_memory.measure.region import Region
from pytest_cka_memory.units import MB, format_size, format_with_unit


@dataclass(frozen=True, repr=False)
class Sweep:
    """One region per batch count, each with a fresh set-up. ``print(sweep)`` shows a table."""

    batch_counts: tuple[int, ...]
    """How many batches each region has seen."""
    regions: tuple[Region, ...]
    """The regions, in the order of `batch_counts`."""

    @property
    def retained_mb(self) -> list[float]:
        """Retained bytes after each batch count, in MB."""
        return [region.retained_mb for region in self.regions]

    @property
    def growth_mb_per_batch(self) -> float | None:
        """The highest ``growth_mb_per_batch`` of the regions: growth while batches are used.

        None if no region has five full batches. Memory that a region keeps until its end and then
        frees counts here, but not in :attr:`growth_over_batch_counts_mb`.
        """
        known = [region.growth_mb_per_batch for region in self.regions]
        return max((growth for growth in known if growth is not None), default=None)

    @property
    def growth_over_batch_counts_mb(self) -> float:
        """(last retained - first retained) / (last count - first count), in MB per batch.

        Raises:
            RegionError: if there is only one batch count.
        """
        if len(self.batch_counts) < 2:
            raise RegionError(
                "growth over batch counts needs two batch counts or more, not "
                f"{self.batch_counts}; write e.g. batch_counts=(1, 8)"
            )
        rise = self.retained_mb[-1] - self.retained_mb[0]
        return rise / (self.batch_counts[-1] - self.batch_counts[0])

    def __repr__(self) -> str:
        counts = ", ".join(map(str, self.batch_counts))
        retained_bytes = [region.record.retained_bytes for region in self.regions]
        retained = ", ".join(map(format_with_unit, retained_bytes))
        return f"<Sweep over {counts} batches: retained {retained}>"

    def _repr_html_(self) -> str:
        """Return a table with one row for each batch count, which notebooks show."""
        return display.table_of_regions(
            [region.record for region in self.regions], "; ".join(self._notes())
        )

    def __str__(self) -> str:
        from tabulate import tabulate  # takes 20 ms, so only for a printed table

        records = [region.record for region in self.regions]
        columns = [row for row in shown_columns(records) if row.name != "batches"]
        rows = [
            [str(count), *(format_size(getattr(record, row.name)) for row in columns)]
            for count, record in zip(self.batch_counts, records, strict=True)
        ]
        head = ["batches", *(row.column for row in columns)]
        # The header is passed as an ordinary row, because tabulate widens columns for a header.
        table = tabulate(
            [head, *rows],
            tablefmt="plain",
            disable_numparse=True,
            colalign=["right"] * len(head),
        )
        return "\n".join([table, *self._notes()])

    def _notes(self) -> list[str]:
        unit = "Sizes are in MB (2**20 bytes) unless a unit is given"
        if len(self.batch_counts) < 2:
            return [unit]
        growth = format_size(self.growth_over_batch_counts_mb * MB)
        return [f"{unit}; growth of retained over batch counts: {growth} per batch"]
