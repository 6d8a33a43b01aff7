"""Names of emulated devices."""

import pytest

from pytest_cka_memory.errors import DeviceError
from pytest_cka_memory.meters import is_emulated, parse_emulated


@pytest.mark.parametrize(
    ("name", "card", "values"),
    [
        ("emulate:cuda", "a100", None),
        ("emulate:cuda:h100", "h100", None),
        ("emulate:cuda,values=off", "a100", False),
        ("emulate:cuda:t4,values=off", "t4", False),
        ("emulate:cuda:h100,values=on", "h100", True),
    ],
)
def test_name_gives_the_card_and_the_settings(name, card, values):
    """A device name gives a card and settings, which are both optional."""
    found = parse_emulated(name)
    assert (found.card, found.values) == (card, values)
    assert is_emulated(name)


@pytest.mark.parametrize(
    ("name", "late"),
    [
        ("emulate:cuda", False),
        ("emulate:cuda,events=late", True),
        ("emulate:cuda:h100,values=off,events=late,devices=2", True),
        ("emulate:cuda,events=at-once", False),
    ],
)
def test_name_says_when_events_come(name, late):
    """An event is done at once, unless the name says that events are late."""
    assert parse_emulated(name).late_events is late


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (
                f"emulate:cuda:{card}",
                f"unknown card '{card}'; write emulate:cuda, or emulate:cuda: and one of a100, ",
            )
            for card in ("a1000", "A100", "a100:0")
        ),
        ("emulate:cuda,values=maybe", "unknown setting 'values=maybe' .*; write values=off"),
        ("emulate:cuda,speed=1", "unknown setting 'speed=1'"),
        (
            "emulate:cuda,events=never",
            "unknown setting 'events=never' .*, events=late, devices=auto or devices=N",
        ),
        ("emulate:xpu", "'emulate:xpu' is not an emulated device; write emulate:cuda"),
    ],
)
def test_wrong_name_is_refused_with_what_to_write(name, message):
    """The error for a wrong device name names the part that is wrong."""
    with pytest.raises(DeviceError, match=message):
        parse_emulated(name)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "emulate", "emulate:cudax", "cpu"])
def test_other_devices_are_not_emulated(name):
    """Only a name that begins with ``emulate:`` is the name of an emulated device."""
    assert not is_emulated(name)


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "16"}, 4),
        ({"WORLD_SIZE": "2"}, 2),
        ({"WORLD_SIZE": "many"}, 1),
        ({}, 1),
    ],
)
def test_automatic_number_of_devices_is_that_of_the_ranks_on_this_machine(
    variables, devices, monkeypatch
):
    """A launcher such as torchrun sets these variables; without one there is one device."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parse_emulated("emulate:cuda:t4,devices=auto").devices == devices
