"""Load the emulated CUDA device of a session, before anything imports torch."""

import os
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest

import emulated_cuda
from emulated_cuda.errors import TooLateError
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import device_names
from pytest_cka_memory.plugin.session.options import early_device, early_device_given_by


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
        emulated_cuda.load(wanted.card, devices, values=wanted.values)
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
