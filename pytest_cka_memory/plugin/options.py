"""The command line and the ini file as every session sees them: names, and whether one is used."""

import pytest

from pytest_cka_memory.core.markers import BASELINE_FILE, KNOWN_DEVICES

_FLAGS = (
    ("report", "measure every test and print a table of memory figures"),
    ("explain", "trace who holds what is retained in every region, not only where a limit broke"),
    ("update-baseline", "write the figures of every measured test that passes as its baseline"),
    ("require-baseline", "fail regions that are held to a baseline and have none on this device"),
)
_VALUED = (
    ("device", "DEVICE", f"device to measure: {', '.join(KNOWN_DEVICES)}, cuda:N; default auto"),
    ("snapshots", "DIR", "dump PyTorch's memory snapshot of each test that breaks a limit (CUDA)"),
    ("json", "PATH", "write the figures of every region to this JSON file"),
    ("markdown", "PATH", "write a summary for a pull request to this Markdown file"),
    ("html", "PATH", "write everything as one page, with charts, to this HTML file"),
    ("github", "WHEN", "annotate a pull request and its job: auto (on GitHub Actions), yes or no"),
    ("max-retained-mb", "MB", "max_retained_mb for tests that have no such marker"),
    ("max-peak-mb", "MB", "max_peak_mb for tests that have no such marker"),
    ("min-regions", "N", "fail the session if fewer regions were measured"),
    ("baseline", "PATH", f"hold every measured test to this file; for markers {BASELINE_FILE}"),
    (
        "tolerance",
        "TOLERANCE",
        "rise above its baseline that a figure may have, as a share or size",
    ),
    ("rank-timeout", "SECONDS", "under torchrun: how long a rank may end no test; default 300"),
)


narrowed_key = pytest.StashKey[bool]()
"""Whether tests were deselected."""


def add_options(parser: pytest.Parser) -> None:
    """Declare every option, with an ini key of the same name."""
    group = parser.getgroup("cka-memory", "memory regression tests for PyTorch")
    for name, text in _FLAGS:
        group.addoption(f"--cka-memory-{name}", action="store_true", default=None, help=text)
        parser.addini(ini_key(name), text, type="bool", default=None)
    for name, metavar, text in _VALUED:
        group.addoption(f"--cka-memory-{name}", metavar=metavar, default=None, help=text)
        parser.addini(ini_key(name), text, default=None)


def ini_key(name: str) -> str:
    """The key of an option in the ini file."""
    return "cka_memory_" + name.replace("-", "_")


def are_given(config: pytest.Config) -> bool:
    """Whether this session was asked for anything, on the command line or in the ini file."""
    return any(
        config.getoption(f"--cka-memory-{name}") is not None
        or config.getini(ini_key(name)) not in (None, "")
        for name, *_ in (*_FLAGS, *_VALUED)
    )
