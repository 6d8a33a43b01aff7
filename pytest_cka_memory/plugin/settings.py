"""Resolve the command line and the ini file, once, into frozen settings."""

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_cka_memory.errors import LimitError, ReportError, SizeError
from pytest_cka_memory.plugin import (
    BASELINE_FILE,
    GRAPH,
    given_by,
    ini_key,
    key_and_file,
    option_of,
)
from pytest_cka_memory.plugin.pytest_private import ini_as_written
from pytest_cka_memory.stored import DEFAULT_TOLERANCE, BaselinePlan
from pytest_cka_memory.units import counted, format_exact, parse_megabytes

if TYPE_CHECKING:
    from pytest_cka_memory.integrations.github import JobStep
    from pytest_cka_memory.reports.tables import RowChoice


@dataclass(frozen=True)
class Settings:
    """What this session was asked to do."""

    report: bool
    """Measure every test and print the table."""
    rows: "RowChoice | None"
    """Which rows of the table; None if the user has not chosen."""
    explain: bool
    """Find what references retained memory in every region, not only if a limit broke."""
    draws_paths: bool
    """Draw the references that lead to it."""
    allow_no_allocations: bool
    """Whether limits hold for tests that allocate nothing on the measured accelerator."""
    device: str
    """As the user named it; ``auto`` by default."""
    snapshots: Path | None
    """Folder for a memory snapshot of each failed test, if any."""
    timeline: str | None
    """Pattern of the names of tests whose memory over time is drawn, if any."""
    files: Mapping[str, Path]
    """Report files to write: ``json`` -> its path."""
    max_retained_bytes: int | None
    """Limit for tests that have none of their own."""
    max_peak_bytes: int | None
    """Limit for tests that have none of their own."""
    min_regions: int
    """Fewer measured regions than this fail the session."""
    baseline: BaselinePlan
    """How this session uses baselines."""
    history: Path | None
    """The file to which this session adds a line, if any."""
    root: Path
    """pytest's root folder."""
    github: "JobStep | None"
    """The step of a GitHub Actions job to report to, if any."""
    repeat: int
    """How often the code of each measured test runs; 1 by default."""
    only_warns: bool
    """Whether a broken limit is a warning in every test."""
    also: tuple[str, ...]
    """What every region measures in addition."""
    rank_timeout_s: float
    """Under torchrun: a rank that finishes no test for this long is treated as hung."""

    @property
    def names_accelerator(self) -> bool:
        """Whether the user named a device that may be unavailable, which is a usage error."""
        return self.device not in ("auto", "cpu")

    @property
    def can_choose_gpu(self) -> bool:
        """Whether the device may be CUDA and the user has not named one GPU of several."""
        return self.device in ("auto", "cuda")

    @property
    def measures_all(self) -> bool:
        """Whether tests without a marker or the fixture are measured too."""
        return self.report or self.has_default_limits

    @property
    def has_default_limits(self) -> bool:
        """Whether an option sets a limit for tests that have none of their own."""
        return self.max_retained_bytes is not None or self.max_peak_bytes is not None

    def draws(self, nodeid: str) -> bool:
        """Whether the memory of a test over time is drawn."""
        pattern = self.timeline
        return pattern is not None and (pattern in nodeid or fnmatchcase(nodeid, pattern))

    @property
    def reports_something(self) -> bool:
        """Whether an option asks for figures, so that a session without any must say so."""
        asked_for = (self.report, self.files, self.history, self.baseline.asked_for)
        return any(map(bool, asked_for))


settings_key = pytest.StashKey[Settings]()

FILES = ("json", "markdown", "html")


def resolve(config: pytest.Config) -> Settings:
    """Read the command line, then the ini file, then the defaults.

    Raises:
        pytest.UsageError: if a value cannot be used; it names the option and says what to write
            instead.
    """
    report, rows = _report(config)
    return Settings(
        report=report,
        rows=rows,
        explain=_flag(config, "explain"),
        draws_paths=_draws_paths(config),
        allow_no_allocations=_flag(config, "allow-no-allocations"),
        device=_device(config),
        snapshots=_path(config, "snapshots", folder=True),
        timeline=_timeline(config),
        files={name: path for name in FILES if (path := _path(config, name)) is not None},
        max_retained_bytes=_size(config, "max-retained-mb"),
        max_peak_bytes=_size(config, "max-peak-mb"),
        min_regions=_count(config, "min-regions"),
        baseline=_baseline(config),
        history=_path(config, "history"),
        root=config.rootpath,
        github=_step(config),
        repeat=_repeat(config),
        only_warns=_mode(config) == "warn",
        also=_also(config),
        rank_timeout_s=_seconds(config, "rank-timeout", 300.0),
    )


def _value_of(config: pytest.Config, name: str) -> Any:
    """Return the value of an option: of the command line, else of the ini file, else None.

    Raises:
        pytest.UsageError: if the value of a flag in the ini file is neither true nor false.
    """
    from_command_line = config.getoption(option_of(name))
    if from_command_line is not None:
        return from_command_line
    try:
        return config.getini(ini_key(name))
    except (ValueError, TypeError, pytest.UsageError) as error:
        if name == "report" and isinstance(written := ini_as_written(config, ini_key(name)), bool):
            return written
        wrong = f"{key_and_file(config, name)}: {error}; write true or false"
    # Outside the except block, otherwise pytest would print both errors.
    raise pytest.UsageError(wrong)


def _flag(config: pytest.Config, name: str) -> bool:
    return bool(_value_of(config, name))


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "")


def _report(config: pytest.Config) -> "tuple[bool, RowChoice | None]":
    """Return whether the table is printed, and its rows if the user has chosen them."""
    choice = _value_of(config, "report")
    is_option = config.getoption(option_of("report")) is not None
    if not isinstance(choice, str):
        return bool(choice), None
    if not is_option and choice.lower() in (*_TRUE, *_FALSE):
        return choice.lower() in _TRUE, None
    from pytest_cka_memory.reports.tables import choice_of

    try:
        return True, choice_of(choice)
    except ReportError as error:
        hint = "" if is_option else "; or true or false"
        raise pytest.UsageError(f"{given_by(config, 'report')}: {error}{hint}") from None


def _valued(config: pytest.Config, name: str) -> str | None:
    from_command_line: str | None = config.getoption(option_of(name))
    return from_command_line if from_command_line is not None else _value_of(config, name) or None


def _device(config: pytest.Config) -> str:
    device = _valued(config, "device")
    return "auto" if device is None else device


def _size(config: pytest.Config, name: str) -> int | None:
    text = _valued(config, name)
    try:
        return None if text is None else parse_megabytes(text)
    except SizeError as error:
        raise pytest.UsageError(f"{given_by(config, name)}: {error}") from None


def _count(config: pytest.Config, name: str) -> int:
    text = _valued(config, name)
    if text is None:
        return 0
    if not text.isdecimal():
        raise pytest.UsageError(
            f"{given_by(config, name)}: cannot read {text!r} as a number of regions; write e.g. 1"
        )
    return int(text)


_LEAST_RUNS = 5
"""One to warm up and four to judge."""


def _repeat(config: pytest.Config) -> int:
    text = _valued(config, "repeat")
    if text is None:
        return 1
    if not text.isdecimal() or int(text) < _LEAST_RUNS:
        raise pytest.UsageError(
            f"{given_by(config, 'repeat')}: cannot use {text!r}; write a number of runs, at least "
            f"{_LEAST_RUNS}: one to warm up and four to judge growth"
        )
    return int(text)


def _mode(config: pytest.Config) -> str:
    mode = _valued(config, "mode") or "fail"
    if mode not in ("fail", "warn"):
        raise pytest.UsageError(
            f"{given_by(config, 'mode')}: cannot use {mode!r}; write warn or fail"
        )
    return mode


def _also(config: pytest.Config) -> tuple[str, ...]:
    text = _valued(config, "also")
    if text is None:
        return ()
    from pytest_cka_memory.core.figure_rows import ADDITIONS, PROCESS

    names = [name.strip() for name in text.split(",")]
    if PROCESS in names and find_spec("psutil") is None:
        raise pytest.UsageError(
            f"{given_by(config, 'also')}: measuring the memory of the process needs psutil, which "
            "is not installed; run pip install 'pytest-cka-memory[process]'"
        )
    unknown = [name for name in names if name not in ADDITIONS]
    if unknown:
        raise pytest.UsageError(
            f"{given_by(config, 'also')}: cannot measure {unknown[0]!r}; write one or several of "
            f"{', '.join(ADDITIONS)}, separated by commas"
        )
    return tuple(dict.fromkeys(names))


def _timeline(config: pytest.Config) -> str | None:
    pattern = _valued(config, "timeline")
    if pattern is None:
        return None
    option = given_by(config, "timeline")
    # pytest takes a file behind the option for its value, and would run all other tests instead.
    if (config.invocation_params.dir / pattern).exists():
        raise pytest.UsageError(
            f"{option}: {pattern!r} is a file or folder, not a part of a test's name; write the "
            "option after the files, or --cka-memory-timeline='*' for all tests"
        )
    if _valued(config, "html") is None:
        raise pytest.UsageError(
            f"{option}: memory over time is drawn only in the HTML page; add --cka-memory-html=PATH"
        )
    return pattern


def _draws_paths(config: pytest.Config) -> bool:
    if config.getoption(option_of("explain")) != GRAPH:
        return False
    if _valued(config, "html") is None and _valued(config, "json") is None:
        raise pytest.UsageError(
            f"{option_of('explain')}={GRAPH}: references are drawn only in the HTML page and "
            "listed only in the JSON report; add --cka-memory-html=PATH or --cka-memory-json=PATH"
        )
    return True


def _seconds(config: pytest.Config, name: str, default: float) -> float:
    text = _valued(config, name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise pytest.UsageError(
            f"{given_by(config, name)}: cannot read {text!r} as a number of seconds; write e.g. 300"
        )
    return seconds


def _step(config: pytest.Config) -> "JobStep | None":
    choice = _valued(config, "github") or "auto"
    if choice not in ("auto", "yes", "no"):
        raise pytest.UsageError(
            f"{given_by(config, 'github')}: cannot use {choice!r}; write auto, yes or no"
        )
    if choice == "auto" and "GITHUB_ACTIONS" not in os.environ:
        return None  # without the import
    from pytest_cka_memory.integrations.github import step_of

    return step_of(choice, os.environ, config.rootpath)


def _baseline(config: pytest.Config) -> BaselinePlan:
    named = _path(config, "baseline")
    tolerance = _valued(config, "tolerance")
    plan = BaselinePlan(
        path=named or config.rootpath / BASELINE_FILE,
        root=config.rootpath,
        tolerance_text=tolerance or DEFAULT_TOLERANCE,
        named=named is not None,
        updating=_flag(config, "update-baseline"),
        pruning=_flag(config, "prune-baseline"),
        required=_flag(config, "require-baseline"),
    )
    if tolerance:
        try:
            _ = plan.tolerance
        except LimitError as error:
            raise pytest.UsageError(f"{given_by(config, 'tolerance')}: {error}") from None
    if plan.required and not plan.updating and not plan.path.exists():
        raise pytest.UsageError(
            f"{given_by(config, 'require-baseline')}: there is no baseline file {plan.path}; write "
            "it with --cka-memory-update-baseline, or name it with --cka-memory-baseline"
        )
    return plan


def _path(config: pytest.Config, name: str, *, folder: bool = False) -> Path | None:
    text = _valued(config, name)
    if text is None:
        return None
    on_command_line = config.getoption(option_of(name)) is not None
    start = config.invocation_params.dir if on_command_line else config.rootpath
    try:
        path = start / Path(text).expanduser()
        mode = path.stat().st_mode  # is_dir() and is_file() hide other errors since Python 3.14
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except RuntimeError:
        raise pytest.UsageError(
            f"{given_by(config, name)}: {text!r} names the home folder of a user that does not "
            "exist here; write the path in full, or ./~name for a folder of that name"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise pytest.UsageError(
            f"{given_by(config, name)}: cannot use {text!r}: {why}; write another path"
        ) from None
    if stat.S_ISDIR(mode) and not folder:
        raise pytest.UsageError(
            f"{given_by(config, name)}: {path} is a folder; write a file's path"
        )
    if stat.S_ISREG(mode) and folder:
        raise pytest.UsageError(
            f"{given_by(config, name)}: {path} is a file; write a folder's path"
        )
    return path


def describe(settings: Settings) -> str:
    """Return a line about every setting that is not the default; empty if there is none."""
    limits = {
        "max retained": settings.max_retained_bytes,
        "max peak": settings.max_peak_bytes,
    }
    parts = ["every test measured"] if settings.measures_all else []
    parts += [f"device {settings.device}"] if settings.device != "auto" else []
    parts += [f"{name} {format_exact(size)}" for name, size in limits.items() if size is not None]
    parts += [f"each test {settings.repeat} times"] if settings.repeat > 1 else []
    parts += ["broken limits only warn"] if settings.only_warns else []
    parts += [f"also {', '.join(settings.also)}"] if settings.also else []
    parts += [f"timeline of {settings.timeline}"] if settings.timeline else []
    parts += [f"at least {counted(settings.min_regions, 'region')}"] if settings.min_regions else []
    plan = settings.baseline
    verb = "writing" if plan.updating else "compared with" if plan.named else "pruning"
    parts += [f"{verb} {plan.path}"] if plan.asked_for else []
    parts += [f"{name} to {path}" for name, path in settings.files.items()]
    parts += [f"history in {settings.history}"] if settings.history else []
    parts += ["annotated for GitHub"] if settings.github and settings.github.asked_for else []
    return ", ".join(parts)
