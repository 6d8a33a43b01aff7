"""Frames of user code: what is left out, and what only looks similar."""

import copy
import os
import re
import sys
import unittest
from pathlib import Path
from types import CodeType, FrameType, ModuleType

import pytest
import torch

import pytest_cka_memory
from pytest_cka_memory.core.allocations import (
    AllocationSite,
    FramesSite,
    RawFrames,
    user_frames,
)
from pytest_cka_memory.core.places import is_foreign, is_installed, is_of_package, short

PACKAGE = Path(pytest_cka_memory.__file__).parent
OF_TORCH = torch.nn.Linear.forward.__code__, 0


@pytest.mark.parametrize(
    ("file", "foreign"),
    [
        (PACKAGE / "measure" / "region.py", True),
        (PACKAGE.with_name("pytest_cka_memory_extra") / "mod.py", False),
        (PACKAGE.with_name("pytest_cka_memory.py"), False),
    ],
    ids=["own", "folder-with-the-same-start", "file-with-the-same-start"],
)
def test_only_files_of_the_plugin_are_foreign(file: Path, foreign: bool) -> None:
    """Frames of the plugin's own files are hidden, and not
    those of a folder with a similar name.
    """
    assert is_foreign(str(file)) is foreign


def place(frame: FrameType) -> tuple[CodeType, int]:
    return frame.f_code, frame.f_lasti


def all_frames() -> RawFrames:
    """Return every frame of this thread, as a counter in the allocator may record them."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found.append(place(frame))
        frame = frame.f_back
    return tuple(found)


def recursive(depth: int) -> tuple[RawFrames, RawFrames]:
    if depth:
        return recursive(depth - 1)
    recorded = torch.overrides.handle_torch_function(  # a frame of torch between two of this file
        lambda: None, (Recorded(),)
    )
    assert isinstance(recorded, tuple)
    return recorded


class Recorded:
    """What torch calls back records the frames, all of them and those of the user."""

    @classmethod
    def __torch_function__(cls, *_: object) -> tuple[RawFrames, RawFrames]:
        return all_frames(), user_frames()


def test_recorded_frames_are_shown_as_those_that_user_frames_selects() -> None:
    """Recorded frames of torch, of pytest and of deep recursions are left out of what is shown."""
    everything, of_user = recursive(10)
    assert len(everything) > 10 > len(of_user)
    site = FramesSite(everything).readable()
    assert site.frames == FramesSite(of_user).readable().frames
    names = [frame.rpartition(" in ")[2].rpartition(".")[2] for frame in site.frames]
    assert names == ["__torch_function__", "recursive"]
    assert "all_frames()" in str(site.code)


def test_frames_of_event_loops_and_of_unittest_are_left_out() -> None:
    """Frames of event loops and of unittest call every test alike, so they are left out."""
    found: list[RawFrames] = []

    class TestIt(unittest.IsolatedAsyncioTestCase):
        async def test_it(self) -> None:
            found.extend((all_frames(), user_frames()))

    TestIt("test_it").debug()
    everything, of_user = found
    assert {"asyncio", "unittest"} <= {Path(code.co_filename).parent.name for code, _ in everything}
    for recorded in (everything, of_user):
        frames = FramesSite(recorded).readable().frames
        assert frames[0].endswith("test_it")
        assert not any(re.match(r"(<python>|unittest|asyncio)/", frame) for frame in frames)


def test_frames_of_python_are_shown_only_if_there_are_no_others() -> None:
    """Python's own frames are shown only if there are no others, as
    when a pool runs torch's code.
    """
    found: list[RawFrames] = []
    copy.deepcopy(Copied(found))
    (both,) = found
    only = tuple(frame for frame in both if frame[0].co_filename == copy.__file__)
    names = [frame.rpartition(" in ")[2] for frame in FramesSite(both).readable().frames]
    function = test_frames_of_python_are_shown_only_if_there_are_no_others.__name__
    assert [name.rpartition(".")[2] for name in names[:2]] == ["__deepcopy__", function]
    assert "/copy.py:" in FramesSite(only).readable().frames[0]


class Copied:
    """What Python's library copies records the frames."""

    def __init__(self, found: list[RawFrames]) -> None:
        self.found = found

    def __deepcopy__(self, _: object) -> None:
        self.found.append(user_frames())


def test_frames_that_call_a_cell_of_a_notebook_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a notebook the cell's own frame is shown, and not those of IPython that call it."""
    package = ModuleType("IPython")
    package.__path__ = ["/lib/IPython"]
    monkeypatch.setitem(sys.modules, "IPython", package)
    found: dict[str, RawFrames] = {}
    cell = compile("found['of the user'] = user_frames()", "<ipython-input-1>", "exec")
    shell = compile("exec(cell, names)", "/lib/IPython/core/interactiveshell.py", "exec")
    names = {"found": found, "user_frames": user_frames}
    exec(shell, {"cell": cell, "names": names})
    frames = FramesSite(found["of the user"]).readable().frames
    assert frames[0] == "<ipython-input-1>:1 in <module>"
    assert not any("interactiveshell" in frame for frame in frames)


def test_the_code_is_that_of_the_innermost_frame_that_is_shown() -> None:
    """The code is that of the innermost frame shown; frames have no operator, dtype or shape."""
    here = sys._getframe()
    site = FramesSite((OF_TORCH, place(here))).readable()
    frame = f"{short(__file__)}:{here.f_code.co_firstlineno + 3} in {here.f_code.co_name}"
    assert site == AllocationSite((frame,), site.code, expression=site.expression)
    assert "place(here)" in str(site.code)


@pytest.mark.parametrize("frames", [(), (OF_TORCH,)], ids=["none", "only-torch"])
def test_without_frames_of_the_user_nothing_is_known(frames: RawFrames) -> None:
    """Without frames of the user nothing is known, as for a thread without Python code."""
    assert FramesSite(frames).readable() == AllocationSite(())


@pytest.mark.parametrize(
    ("file", "of_package", "installed"),
    [
        ("/other/lib/python3.11/site-packages/timm/models.py", True, True),
        ("/usr/lib/python3/dist-packages/yaml/nodes.py", True, True),
        (os.__file__, False, True),
        ("/home/me/project/site-packages.py", False, False),
    ],
    ids=["another-environment", "debian", "python", "user"],
)
def test_package_is_installed_in_whichever_site_folder_it_is(
    file: str, of_package: bool, installed: bool
) -> None:
    """A package may be in any site folder, also one seen by ``--system-site-packages``."""
    assert (is_of_package(file), is_installed(file)) == (of_package, installed)
