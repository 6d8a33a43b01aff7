"""The figures of a region as attributes, for editors and type checkers.

They follow from the registry in :mod:`pytest_cka_memory.core.figures`; a test compares both.
"""


class FigureAttributes:
    """Names and types of what a region reads from its record; it has no values of its own."""

    start_bytes: int
    start_mb: float
    end_bytes: int
    end_mb: float
    peak_bytes: int
    peak_mb: float
    peak_without_scratch_bytes: int | None
    peak_without_scratch_mb: float | None
    retained_bytes: int
    retained_mb: float
    reserved_start_bytes: int | None
    reserved_start_mb: float | None
    reserved_peak_bytes: int | None
    reserved_peak_mb: float | None
    reserved_end_bytes: int | None
    reserved_end_mb: float | None
    reserved_after_cleaning_bytes: int | None
    reserved_after_cleaning_mb: float | None
    garbage_at_peak_bytes: int | None
    garbage_at_peak_mb: float | None
    garbage_end_bytes: int | None
    garbage_end_mb: float | None
    one_time_bytes: int | None
    one_time_mb: float | None
    host_retained_bytes: int | None
    host_retained_mb: float | None
    peak_increase_bytes: int
    peak_increase_mb: float
    increase_without_scratch_bytes: int | None
    increase_without_scratch_mb: float | None
    net_bytes: int
    net_mb: float
    reserved_increase_bytes: int | None
    reserved_increase_mb: float | None
    growth_bytes_per_batch: float | None
    growth_mb_per_batch: float | None
    reserved_growth_bytes_per_batch: float | None
    reserved_growth_mb_per_batch: float | None
    outside_growth_bytes_per_batch: float | None
    outside_growth_mb_per_batch: float | None
    pools_growth_bytes_per_batch: float | None
    pools_growth_mb_per_batch: float | None
    completed: bool
    garbage_left: bool
    garbage_freed: bool
    cycle_bytes: int | None
    cycle_mb: float | None
    process_start_bytes: int | None
    process_start_mb: float | None
    process_peak_bytes: int | None
    process_peak_mb: float | None
    process_end_bytes: int | None
    process_end_mb: float | None
    process_torch_bytes: int | None
    process_torch_mb: float | None
    process_increase_bytes: int | None
    process_increase_mb: float | None
    driver_start_bytes: int | None
    driver_start_mb: float | None
    driver_peak_bytes: int | None
    driver_peak_mb: float | None
    driver_end_bytes: int | None
    driver_end_mb: float | None
    outside_start_bytes: int | None
    outside_start_mb: float | None
    outside_peak_bytes: int | None
    outside_peak_mb: float | None
    pools_start_bytes: int | None
    pools_start_mb: float | None
    pools_bytes: int | None
    pools_mb: float | None
    pools_reserved_bytes: int | None
    pools_reserved_mb: float | None
    pools_increase_bytes: int | None
    pools_increase_mb: float | None
    outside_increase_bytes: int | None
    outside_increase_mb: float | None
    process_growth_bytes_per_batch: float | None
    process_growth_mb_per_batch: float | None
