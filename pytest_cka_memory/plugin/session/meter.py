"""The meter of a session, made on first use: this is where torch is imported."""

from typing import TYPE_CHECKING

import pytest

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.plugin.failures import fail
from pytest_cka_memory.plugin.session.options import given_by
from pytest_cka_memory.plugin.session.settings import settings_key

if TYPE_CHECKING:
    from pytest_cka_memory.meters.base import Meter

meter_key = pytest.StashKey["Meter"]()


def meter_of(config: pytest.Config) -> "Meter":
    """Return the session's meter.

    Raises:
        pytest.UsageError: if the device is not available.
    """
    if meter_key not in config.stash:
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
