"""The device of a session, the meter that reads its memory, and files of its allocations.

An emulated device is loaded before conftest files and torch are imported, so this module imports
little. The meter is made on first use: this is where torch is imported.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING
from zlib import crc32

import pytest

import emulated_cuda
from emulated_cuda.errors import TooLateError
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.integrations.process_roles import this_rank
from pytest_cka_memory.meters import device_names
from pytest_cka_memory.plugin.options import early_device, early_device_given_by, given_by
from pytest_cka_memory.plugin.pytest_private import fail

if TYPE_CHECKING:
    from pytest_cka_memory.measure.probe import MemoryProbe
    from pytest_cka_memory.meters.base import Meter
    from pytest_cka_memory.plugin.settings import Settings


def load_emulated_device(early_config: pytest.Config) -> None:
    """Load the device that the session names.

    A session that only lists tests or prints help goes on without the device.

    Raises:
        pytest.UsageError: if it cannot be emulated here; says why and what to do. If torch has
            looked for devices before, it names the plugins that imported torch.
    """
    try:
        wanted = device_names.parse(early_device(early_config) or device_names.EMULATED)
        devices = max(wanted.devices, _local_ranks())
        emulated_cuda.load(
            wanted.card, devices, values=wanted.values, late_events=wanted.late_events
        )
    except (DeviceError, emulated_cuda.DeviceError) as error:
        given = early_config.known_args_namespace
        if given.collectonly or given.help or given.version:
            return
        wrong = f"{early_device_given_by(early_config)}: {error}"
        if isinstance(error, TooLateError):
            importers = _importers_of_torch(early_config) or ["code that no longer refers to it"]
            wrong += f" (torch was imported by {', '.join(importers)})"
    else:
        return
    # Outside the except block, otherwise pytest would print both errors.
    raise pytest.UsageError(wrong)


def _local_ranks() -> int:
    """Return how many processes torchrun has started on this machine; each has its own device."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _importers_of_torch(config: pytest.Config) -> list[str]:
    """Return the plugins and the script that use torch; if none does, the modules that do."""
    plugins = [
        f"plugin {name}"
        for name, plugin in config.pluginmanager.list_name_plugin()
        if isinstance(plugin, ModuleType) and _uses_torch(plugin)
    ]
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None) or "the interactive session"
    return plugins + [script] * _uses_torch(main) or list(_modules_that_use_torch())


def _modules_that_use_torch() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]  # torch replaces functions of the standard library
        is_other = package not in ("torch", "torchgen", "functorch", *sys.stdlib_module_names)
        if is_other and isinstance(module, ModuleType) and _uses_torch(module):
            yield f"module {name}"


def _uses_torch(module: ModuleType) -> bool:
    """Whether torch, or a module, class or function of it, is among a module's globals."""
    names = (
        value.__name__ if isinstance(value, ModuleType) else value.__module__
        for value in list(vars(module).values())
        if isinstance(value, (ModuleType, FunctionType, type))
    )
    return any(str(name).partition(".")[0] == "torch" for name in names)


meter_key = pytest.StashKey["Meter"]()


def meter_of(config: pytest.Config) -> "Meter":
    """Return the session's meter.

    Raises:
        pytest.UsageError: if the device is not available.
    """
    if meter_key not in config.stash:
        # Known by now, but not when an emulated device is loaded.
        from pytest_cka_memory.plugin.settings import settings_key

        device = config.stash[settings_key].device
        try:
            config.stash[meter_key] = config.hook.pytest_cka_memory_meter(
                config=config, device=device
            )
        except DeviceError as error:
            raise pytest.UsageError(f"{given_by(config, 'device')}: {error}") from None
        config.stash[meter_key].note_conditions()
    return config.stash[meter_key]


def known_meter(config: pytest.Config) -> "Meter | None":
    """Return the session's meter if it has been made already, otherwise None."""
    return config.stash.get(meter_key, None)


def fail_without_meter(item: pytest.Item) -> None:
    """Make the meter for a test that will be measured; fail the test if there is no device."""
    try:
        meter_of(item.config)
        return
    except pytest.UsageError as error:
        wrong = str(error)
    # Outside the except block, otherwise pytest would print both errors.
    fail(f"{item.nodeid}: {wrong}", wrong)


_LONGEST_NAME = 120


@contextmanager
def history_recorded(folder: Path | None, meter: "Meter") -> Iterator[None]:
    """Record the allocator's history in the block, if there is a folder for snapshots of it."""
    if folder is not None:
        meter.record_history()
    try:
        yield
    finally:
        if folder is not None:
            meter.stop_history()


_COMMANDS = "python -m pytest_cka_memory snapshot {0}\npython -m pytest_cka_memory replay {0}"
_HOW_TO_RECORD = (
    "to see what each line had, and which setting of the allocator would have fitted: run pytest "
    "with --cka-memory-snapshots=FOLDER, then\n" + _COMMANDS.format("FILE")
)


def snapshot_line(settings: "Settings", nodeid: str, probe: "MemoryProbe") -> str:
    """Write the allocator's history of a failed test; return text about it, empty if there is none.

    It is written if there is a folder for snapshots. If memory was missing and the program itself
    records the history, it is written beside the report, if there is one. Without a history there
    is nothing to write: the tensors of the test are freed by now, and what was reserved when memory
    was missing is in the failure's message, with the lines and holders that no snapshot has.

    Args:
        settings: of the session.
        nodeid: the test.
        probe: what has measured it.
    """
    if settings.snapshots is not None:
        return write_snapshot(settings.snapshots, nodeid, probe.meter)
    if all(record.refusal is None for record in probe.records):
        return ""
    for report in settings.files.values():
        line = write_snapshot(report.parent, nodeid, probe.meter)
        if not line.startswith(_NONE):
            return line
    return _HOW_TO_RECORD


_NONE = "no memory snapshot: "


def write_snapshot(folder: Path, nodeid: str, meter: "Meter") -> str:
    """Write the allocator's history of a test to a file in `folder`; return a line about it.

    It does not raise if the file cannot be written: a full disk must not hide why the test failed.
    """
    path = _path(folder, nodeid)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not meter.dump_history(path):
            return f"{_NONE}{meter.device} records no allocation history"
    except OSError as error:
        path.unlink(missing_ok=True)
        return f"{_NONE}cannot write {path}: {error.strerror or error}"
    commands = _COMMANDS.format(shlex.quote(str(path)))
    return f"{path}: open it in PyTorch's memory viewer, or\n{commands}"


def _path(folder: Path, nodeid: str) -> Path:
    # With a checksum, because two tests may differ only in characters that file names cannot have.
    checksum = crc32(nodeid.encode(errors="backslashreplace"))
    name = f"{re.sub(r'[^-.A-Za-z0-9]+', '_', nodeid)[-_LONGEST_NAME:]}-{checksum:08x}"
    rank = this_rank()
    return folder / (f"{name}-rank{rank.number}.pickle" if rank else f"{name}.pickle")
