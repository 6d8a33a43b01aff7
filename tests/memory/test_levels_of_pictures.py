"""The level of the device at each moment of a picture of memory over time."""

from pytest_cka_memory.core.memory_timeline import (
    Place,
    RecordedBlock,
    Recording,
    levels_of,
    picture_of,
)


def test_levels_are_those_of_all_blocks() -> None:
    """A block counts from its allocation to its release; what is older counts from the start."""
    blocks = [
        RecordedBlock(10, 1, 3, 0, 1, False, 0),
        RecordedBlock(5, 2, 0, 1, 1, False, 0),
        RecordedBlock(100, 0, 4, 2, 1, False, 0),
        RecordedBlock(7, 1, 2, 0, 1, True, 0),
    ]
    recording = Recording(
        *(blocks, 4, 2, 135, 120, 0),
        site_of=lambda stack: None,
        module_path=lambda module: "",
        insides=(None,),
    )
    picture = picture_of(recording, lambda keys: [Place("", "", "", "", ())] * len(keys))
    assert levels_of(picture) == [(0, 120), (1, 130), (2, 135), (3, 125), (4, 25)]
    assert levels_of({"memories": []}) == []
