"""The device of a session, and the meter that reads its memory.

An emulated device is loaded before conftest files and torch are imported, so this module imports
little. The meter is made on first use: this is where torch is imported.
"""

import os
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

import pytest

import emulated_cuda
from emulated_cuda.errors import TooLateError
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import EMULATED, parse_emulated
from pytest_cka_memory.plugin import early_device, early_device_given_by, given_by
from pytest_cka_memory.plugin.pytest_private import fail

if TYPE_CHECKING:
    from pytest_cka_memory.meters.base import Meter


def load_emulated_device(early_config: pytest.Config) -> None:
    """Load the device that the session names.

    A session that only lists tests or prints help goes on without the device.

    Raises:
        pytest.UsageError: if it cannot be emulated here; says why and what to do. If torch has
            looked for devices before, it names the plugins that imported torch.
    """
    try:
        wanted = parse_emulated(early_device(early_config) or EMULATED)
        devices = max(wanted.devices, _local_ranks())
        emulated_cuda.load(
            wanted.card, devices, values=wanted.values, late_events=wanted.late_events
        )
    except (DeviceError, emulated_cuda.DeviceError) as error:
        options = early_config.known_args_namespace
        if options.collectonly or options.help or options.version:
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
