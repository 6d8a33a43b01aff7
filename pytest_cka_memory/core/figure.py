"""What the reports need to know about one figure of a region."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What the reports need to know about one figure of a region."""

    noun: str
    """Its name in messages: ``peak increase``."""
    description: str
    """One sentence for the JSON schema."""
    column: str = ""
    """Its heading in tables; empty if tables do not show it."""
    legend: str = ""
    """What the column means, in a few words."""
    position: int = 0
    """Its place among the columns of tables and the figures of baselines, from left to right."""
    importance: int = 0
    """How long its column stays in a table that is too wide: the lowest are left out first."""
    shown_as: str = ""
    """The figure whose column shows it, if it has none of its own."""
    only_if_known: bool = False
    """Whether tables drop its column if no region has a value."""
    only_if_not_zero: bool = False
    """Whether tables drop its column if no region has a value other than 0."""
    never_negative: bool = False
    in_baselines: bool = False
    """Whether baselines keep it and comparisons look at it."""
    advice_if_at_entry: str = ""
    """What to do if more of it was live at entry than was allocated in the region."""
    explained_by: str = ""
    """The field of the record that lists the storages whose bytes it counts; empty if none does."""
    judged_as: str = ""
    """The figure that a limit judges in its place; empty if it is judged itself, or never."""
    above_entry: bool = False
    """Whether it is a level above that at entry, so that a chart of levels can show its limit."""
    advice: str = ""
    """What to do when it is too high and nothing more specific is known."""
    unknown_because: str = "this device has no reserve"
    """Why it may be None, for limits that cannot be judged then."""
    measured_by: str = ""
    """Which of the additions measures it, that are made only if they are asked for."""
    of_device: bool = True
    """Whether it is about memory of the measured device: a test that forgets to use the device
    keeps every limit on it."""
    depends_on: tuple[str, ...] = ()
    """The facts it depends on besides the device and versions, as in ``conditions.FACTS``."""
    in_place_of: str = ""
    """The figure in whose place it is compared if that one depends on a fact that has changed."""
    includes: str = ""
    """A figure whose bytes it includes, so that it is too high if that one is; empty if none."""
    name: str = ""
    """Its attribute of the record, filled in by the registry."""
    optional: bool = False
    """Whether it can be None, filled in by the registry."""

    def shown_value(self, record: Any) -> Any:
        """Return its value as tables show it: None if a column that is rarely shown has nothing."""
        value = getattr(record, self.name)
        return None if self.only_if_not_zero and value == 0 else value

    @property
    def mb_name(self) -> str:
        """Name of the same figure in MB; the same name if it does not count bytes."""
        return self.name.replace("_bytes", "_mb")

    def advice_for(self, record: Any) -> str:
        """Return what to do if it is too high in `record`; empty if there is no advice."""
        at_entry = record.start_bytes > record.peak_increase_bytes
        return self.advice_if_at_entry if at_entry and self.advice_if_at_entry else self.advice
