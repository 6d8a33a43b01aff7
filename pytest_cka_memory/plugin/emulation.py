"""Load the emulated CUDA device of a session, before anything imports torch."""

import os
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from pytest_cka_memory.emulated import loading, specification
from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.plugin.options import early_device


def load_emulated_device(early_config: pytest.Config) -> None:
    """Load the device that the session names.

    Raises:
        pytest.UsageError: if it cannot be emulated here; says why and what to do. If torch came
            first, it names the plugins that imported it.
    """
    try:
        wanted = specification.parse(early_device(early_config) or specification.EMULATED)
        loading.load(wanted.card.name, max(wanted.devices, _local_ranks()))
    except DeviceError as error:
        importers = list(_importers_of_torch(early_config))
        named = f" (torch was imported by {', '.join(importers)})" if importers else ""
        wrong = f"--cka-memory-device: {error}{named}"
    else:
        return
    # Outside the except block, otherwise pytest would print both errors.
    raise pytest.UsageError(wrong)


def _local_ranks() -> int:
    """Return how many processes torchrun has started on this machine; each has its own device."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _importers_of_torch(config: pytest.Config) -> Iterator[str]:
    """Yield the plugins, and the script, that have torch among their globals."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, plugin in config.pluginmanager.list_name_plugin():
        if isinstance(plugin, ModuleType) and _uses(plugin, torch):
            yield f"plugin {name}"
    main = sys.modules.get("__main__")
    if main is not None and _uses(main, torch):
        yield getattr(main, "__file__", None) or "the interactive session"


def _uses(module: ModuleType, torch: ModuleType) -> bool:
    return any(
        value is torch or str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
        for value in list(vars(module).values())
    )
