"""A torch version that is newer than those tried is named once."""

import pytest

from emulated_cuda import torch_versions
from emulated_cuda.torch_versions import warning_about

MAJOR, MINOR = torch_versions.NEWEST_TRIED


@pytest.mark.parametrize(
    ("version", "named"),
    [
        (f"{MAJOR}.{MINOR + 1}.0", f"{MAJOR}.{MINOR + 1}"),
        (f"{MAJOR}.{MINOR + 1}.0.dev20270110+cu132", f"{MAJOR}.{MINOR + 1}"),
        (f"{MAJOR}.{MINOR + 1}.0a0+git1234567", f"{MAJOR}.{MINOR + 1}"),
        (f"{MAJOR}.{MINOR + 1}.0rc1", f"{MAJOR}.{MINOR + 1}"),
        (f"{MAJOR}.100.1", f"{MAJOR}.100"),
        (f"{MAJOR + 1}.0.0", f"{MAJOR + 1}.0"),
    ],
)
def test_newer_version_is_named(version, named):
    """A torch version newer than those tried is named by its major and minor number."""
    assert warning_about(version) == (
        f"emulated_cuda has not been tried with torch {named}. torch's own allocator still counts "
        "the memory of tensors, but other figures may be wrong"
    )


@pytest.mark.parametrize(
    "version",
    [f"{MAJOR}.{MINOR}.0", f"{MAJOR}.{MINOR}.9+cpu", "2.9.1+cu128", "1.100.0", "unknown", None],
)
def test_version_that_was_tried_is_not_named(version):
    """A torch version that was tried, is older, or has no readable number is not named."""
    assert warning_about(version) is None
