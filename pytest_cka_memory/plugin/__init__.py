"""pytest's hooks, and what only they need.

This module itself, which every session imports, declares the options and ini keys, and finds out
whether a session uses one. Their values are read in :mod:`.settings`.
"""

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from pytest_cka_memory.meters import KNOWN_DEVICES
from pytest_cka_memory.plugin.pytest_private import written_keys

BASELINE_FILE = "cka-memory-baseline.json"
"""Name of the baseline file, in pytest's root folder, if no option names another."""

_FLAGS = (
    ("update-baseline", "write the figures of every measured test that passes as its baseline"),
    (
        "allow-no-allocations",
        "let tests pass that allocate nothing on the measured accelerator; without this option, "
        "tests whose markers limit the accelerator's memory fail if they allocate nothing there",
    ),
    ("prune-baseline", "remove the baselines of tests and regions that no longer exist"),
    ("require-baseline", "fail regions that should have a baseline for this device but have none"),
)
_VALUED = (
    ("device", "DEVICE", f"device to measure: {', '.join(KNOWN_DEVICES)} or cuda:N; default auto"),
    (
        "snapshots",
        "DIR",
        "write PyTorch's memory snapshot of each failed test into this folder (CUDA)",
    ),
    ("json", "PATH", "write the figures of every region to this JSON file"),
    ("markdown", "PATH", "write a summary for a pull request to this Markdown file"),
    ("html", "PATH", "write the figures of every region, with charts, to this HTML file"),
    ("history", "PATH", "add a line with the figures of this session to this file"),
    (
        "github",
        "WHEN",
        "annotate broken limits in a pull request and add the report to the job's summary: auto "
        "(default: only on GitHub Actions), yes or no",
    ),
    (
        "max-retained-mb",
        "MB",
        "apply max_retained_mb(MB) to tests that have no marker max_retained_mb or zero_retention",
    ),
    ("max-peak-mb", "MB", "apply max_peak_mb(MB) to tests that have no marker max_peak_mb"),
    (
        "repeat",
        "N",
        "run each measured test N times, at least 5, and judge how memory grows from run to run",
    ),
    ("min-regions", "N", "fail the session if fewer than N regions were measured"),
    (
        "baseline",
        "PATH",
        "compare every measured test with the baselines in this file; without this option, only "
        f"tests with the marker memory_baseline are compared, with {BASELINE_FILE}",
    ),
    (
        "tolerance",
        "TOLERANCE",
        "how far a figure may rise above its baseline, such as 5% or '5% + 64 KiB'; default 5%",
    ),
    (
        "mode",
        "MODE",
        "what a broken limit does: fail (default) fails the test, warn only warns",
    ),
    (
        "also",
        "NAMES",
        (
            "also measure in every region: cycles (garbage in reference cycles), process (memory "
            "of the process and its children), driver (memory in use on the card) or pools "
            "(private pools of CUDA graphs and MemPool); write several as cycles,process"
        ),
    ),
    (
        "rank-timeout",
        "SECONDS",
        "under torchrun: treat a rank that finishes no test for this long as hung; default 300",
    ),
)
_REPORT = (
    "measure every test and print a table of memory figures of the 100 regions with the highest "
    "peaks; =20, =retained, =20:retained or =all choose how many regions, and the column to sort by"
)
_TIMELINE = (
    "draw memory over time in the page of --cka-memory-html, for every measured test, or for those "
    "whose name contains or matches PATTERN"
)
_EXPLAIN = (
    "find the references to retained memory, and the kinds of memory that were live at the peak, "
    "in every region, not only in those that broke a limit"
)
_GRAPH = (
    "; with --cka-memory-explain=graph, the page of --cka-memory-html has a picture of these "
    "references"
)
narrowed_key = pytest.StashKey[bool]()
"""Whether tests were deselected."""


GRAPH = "graph"
"""The value of ``--cka-memory-explain`` with which paths of references are drawn."""


class _Valued(argparse.Action):
    """Stores whether an option is given, or the value behind its ``=``.

    Each value is a name of the option, so that argparse never takes a file behind the option for
    its value.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        # With both, in addopts and on the command line, a value counts.
        value = str(option_string).partition("=")[2]
        setattr(namespace, self.dest, value or getattr(namespace, self.dest) or True)


def written_reports(config: pytest.Config) -> list[str]:
    """Return every ``--cka-memory-report=VALUE`` that this session is called with."""
    written = [*config.invocation_params.args, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    with suppress(ValueError):  # the ini file is not read yet
        written += config.getini("addopts")
    return [text for text in map(str, written) if text.startswith(f"{option_of('report')}=")]


def add_options(parser: pytest.Parser, reports: Iterable[str] = ()) -> None:
    """Declare every option, with an ini key of the same name.

    Args:
        parser: pytest's.
        reports: what :func:`written_reports` returns.
    """
    group = parser.getgroup("cka-memory", "memory regression tests for PyTorch")
    for name, text in _FLAGS:
        group.addoption(option_of(name), action="store_true", default=None, help=text)
        parser.addini(ini_key(name), text, type="bool", default=None)
    for name, metavar, text in _VALUED:
        option = option_of(name)
        # argparse formats the help of an option; pytest does not format that of an ini key.
        group.addoption(option, metavar=metavar, default=None, help=text.replace("%", "%%"))
        parser.addini(ini_key(name), text, default=None)
    report = dict.fromkeys((option_of("report"), *reports))
    group.addoption(*report, action=_Valued, default=None, help=_REPORT)
    parser.addini(ini_key("report"), _REPORT, default=None)
    explain = option_of("explain")
    names = explain, f"{explain}={GRAPH}"
    group.addoption(*names, action=_Valued, default=None, help=_EXPLAIN + _GRAPH)
    parser.addini(ini_key("explain"), _EXPLAIN, type="bool", default=None)
    timeline = option_of("timeline")
    group.addoption(timeline, nargs="?", const="*", metavar="PATTERN", default=None, help=_TIMELINE)
    parser.addini(ini_key("timeline"), _TIMELINE, default=None)


def ini_key(name: str) -> str:
    """Return the key of an option in the ini file."""
    return "cka_memory_" + name.replace("-", "_")


def option_of(name: str) -> str:
    """Return an option as it is written on the command line."""
    return f"--cka-memory-{name}"


def name_of(option: str) -> str:
    """Return the name of an option: ``device`` for ``--cka-memory-device``."""
    return option.removeprefix(option_of(""))


def given_by(config: pytest.Config, name: str) -> str:
    """Return where the value of an option comes from, for messages about that value.

    The option itself, or ``cka_memory_device in pytest.ini``.
    """
    if config.getoption(option_of(name)) is not None or not config.getini(ini_key(name)):
        return option_of(name)
    return key_and_file(config, name)


def key_and_file(config: pytest.Config, name: str) -> str:
    """Return the key of an option and the ini file: ``cka_memory_device in pytest.ini``."""
    file = "the configuration" if config.inipath is None else config.inipath.name
    return f"{ini_key(name)} in {file}"


def early_device(early_config: pytest.Config) -> str | None:
    """Return the device that the command line or the ini file names, before options are parsed."""
    option: str | None = early_config.known_args_namespace.cka_memory_device
    return option or early_config.getini(ini_key("device"))


def early_device_given_by(early_config: pytest.Config) -> str:
    """Return what :func:`given_by` returns for the device, before options are parsed."""
    from_command_line = early_config.known_args_namespace.cka_memory_device
    return option_of("device") if from_command_line else key_and_file(early_config, "device")


def are_given(config: pytest.Config) -> bool:
    """Whether any option is set, on the command line or in the ini file."""
    return any(
        config.getoption(option_of(name)) is not None or _is_in_ini_file(config, ini_key(name))
        for name in _names()
    )


def _names() -> list[str]:
    return [*(name for name, *_ in (*_FLAGS, *_VALUED)), "report", "explain", "timeline"]


def refuse_unknown_keys(config: pytest.Config) -> None:
    """Stop the session if a key of the ini file begins as ours do but is none.

    pytest only warns of it, and the limit that somebody meant would not hold.

    Raises:
        pytest.UsageError: names the key that was probably meant.
    """
    known = list(map(ini_key, _names()))
    for key in written_keys(config):
        if not key.startswith(ini_key("")) or key in known:
            continue
        try:
            config.getini(key)  # another plugin's may begin so, too
        except ValueError as error:
            from difflib import get_close_matches

            (near,) = get_close_matches(key, known, n=1, cutoff=0)
            file = "the configuration" if config.inipath is None else config.inipath.name
            raise pytest.UsageError(
                f"there is no key {key!r} ({file}); did you mean {near}? All keys: "
                f"{', '.join(sorted(known))}"
            ) from error


def _is_in_ini_file(config: pytest.Config, key: str) -> bool:
    try:
        return config.getini(key) not in (None, "")
    except (ValueError, TypeError, pytest.UsageError):
        return True  # a value that cannot be read, about which the settings raise an error


def is_narrowed(config: pytest.Config) -> bool:
    """Whether tests of a collected file may be missing from this session."""
    narrowed = config.stash.get(narrowed_key, None)
    if narrowed is None:  # asked for each test, but the command line does not change
        narrowed = config.stash[narrowed_key] = (
            any("::" in arg for arg in config.args)
            or bool(config.getoption("lf", False))  # --last-failed deselects without the hook
        )
    return narrowed
