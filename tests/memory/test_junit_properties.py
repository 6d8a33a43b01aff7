"""Properties for JUnit XML: the figures, and the device if it was not measured."""

from collections.abc import Callable

import pytest

from pytest_cka_memory import RegionRecord
from pytest_cka_memory.core.verdicts import judge
from pytest_cka_memory.reports.tables import properties_of
from pytest_cka_memory.testing import ScriptedMeter


@pytest.mark.parametrize(
    ("meter", "named"),
    [
        ("PyTorch's caching allocator", False),
        ("PyTorch's caching allocator, emulated device", True),
    ],
    ids=["measured", "emulated"],
)
def test_a_device_that_was_not_measured_is_a_property(
    record: Callable[..., RegionRecord], meter: str, named: bool
) -> None:
    """A device that was not measured is a JUnit property, so that no figure passes for a measured
    one.
    """
    facts = {**ScriptedMeter().facts(), "meter": meter, "device_name": "some card (no GPU)"}
    properties = dict(properties_of([judge("t.py::t", record(), [])], facts))
    assert properties.get("cka_memory.device") == ("some card (no GPU)" if named else None)
    assert properties["cka_memory.retained_bytes"] == 0
