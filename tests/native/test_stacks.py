"""The Python frames of allocations: whose they are, how many, and that nothing is kept."""

import gc
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType

import pytest
import torch
from torch import nn

from pytest_cka_memory.core.allocations import Context, FramesSite
from pytest_cka_memory.meters.blocks.counter import Counter, RegionCounter
from pytest_cka_memory.meters.blocks.written import notes_modules


@pytest.fixture
def region(counter: Counter) -> Iterator[RegionCounter]:
    """An open region: only then are frames noted."""
    region = counter.open()
    yield region
    region.close()


@pytest.fixture
def frames_of(counter: Counter, region: RegionCounter) -> Callable[..., list[tuple[str, str]]]:
    """Return file and function of the frames of the newest block that a function keeps."""

    def frames(make: Callable[[], object]) -> list[tuple[str, str]]:
        since = counter.figures().serial
        kept = make()
        newest = counter.allocations_since(since)[0].recorded
        del kept
        if newest is None:
            return []
        assert isinstance(newest, FramesSite)
        return [(code.co_filename, code.co_name) for code, _ in newest.frames]

    return frames


def calling(files: list[str]) -> Callable[[], torch.Tensor]:
    """Return a function that calls one in each of these files, which do not exist."""
    function: Callable[[], torch.Tensor] = lambda: torch.zeros(5)  # noqa: E731
    for file in files:
        names: dict[str, object] = {"inner": function}
        exec(compile("def call():\n    return inner()\n", file, "exec"), names)
        function = names["call"]
    return function


def test_frames_of_torch_are_left_out(frames_of) -> None:
    """Frames of torch are left out, so the innermost is that of the user's call of a module."""
    module = nn.Linear(4, 4)
    names = [name for _, name in frames_of(lambda: module(torch.ones(2, 4)))]
    assert names == ["<lambda>", "frames"]


def test_frames_end_at_those_of_pytest(frames_of) -> None:
    """Frames end at pytest's own: the test itself is there, but not what called it."""
    found = frames_of(calling(["one.py", "other.py"]))
    assert [file for file, _ in found] == [__file__, "one.py", "other.py", __file__, __file__]
    assert found[-1][1] == "test_frames_end_at_those_of_pytest"


def test_a_recursion_has_two_frames_of_its_file(frames_of) -> None:
    """A recursion has two frames of its file at most, so that its caller is seen."""
    found = frames_of(calling(["deep.py"] * 20))
    assert [file for file, _ in found] == [__file__, "deep.py", "deep.py", __file__, __file__]


def test_a_stack_has_six_frames_at_most(frames_of) -> None:
    """A stack has at most six frames, the innermost ones."""
    files = [f"{number}.py" for number in range(10)]
    found = frames_of(calling(files))
    assert [file for file, _ in found] == [__file__, *files[:5]]


def test_frames_deeper_than_a_hundred_are_not_searched(frames_of) -> None:
    """Only a hundred frames are searched, so that a test in a deep recursion does not get slow."""
    found = frames_of(calling(["deep.py"] * 200))
    assert [file for file, _ in found] == [__file__, "deep.py", "deep.py"]


@pytest.fixture
def module_of(counter: Counter, region: RegionCounter) -> Callable[..., int]:
    """Return the identity of the module that made the newest block which a function keeps."""
    if not notes_modules():
        pytest.skip("the layout of frames is not known in this version of Python")

    def module(make: Callable[[], object]) -> int:
        since = counter.figures().serial
        kept = make()
        newest = counter.allocations_since(since)[0].recorded
        del kept
        assert isinstance(newest, FramesSite)
        return newest.module

    return module


class Doubling(nn.Module):
    """Allocates after an inner module has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.inner(values)
        return values * 2


def test_modules_are_noted_in_every_version_that_is_supported() -> None:
    """Modules are noted in CPython 3.10 to 3.14, unless it is free-threaded."""
    is_known = sys.implementation.name == "cpython" and sys.version_info[:2] < (3, 15)
    assert notes_modules() == (is_known and not sysconfig.get_config_var("Py_GIL_DISABLED"))


def test_innermost_running_module_is_noted(module_of) -> None:
    """The innermost module is noted only while it runs, also with hooks and in a thread."""
    outer, values = Doubling(), torch.ones(2, 4)
    assert module_of(lambda: outer.inner(values)) == id(outer.inner)
    assert module_of(lambda: outer(values)) == id(outer)
    assert module_of(lambda: values * 2) == 0
    outer.register_forward_hook(lambda module, args, output: output + 1)
    assert module_of(lambda: outer(values)) == id(outer)
    assert module_of(lambda: nn.Sequential(nn.Sequential(outer.inner))(values)) == id(outer.inner)

    def in_thread() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: found.append(outer.inner(values)))
        thread.start()
        thread.join()
        return found

    assert module_of(in_thread) == id(outer.inner)


def test_backward_pass_runs_in_no_module(module_of) -> None:
    """A backward pass is started by the user's line, so it runs in no module."""
    module = nn.Linear(4, 4)
    loss = module(torch.ones(2, 4)).sum()

    def step() -> torch.Tensor | None:
        loss.backward()
        return module.weight.grad

    assert module_of(step) == 0


def test_noting_modules_keeps_none_alive(module_of) -> None:
    """A noted module is only a number, so that noting it does not keep it alive."""
    modules = [nn.Linear(4, 4)]
    reference = weakref.ref(modules[0])
    assert module_of(lambda: modules[0](torch.ones(2, 4))) == id(modules[0])
    modules.clear()
    gc.collect()
    assert reference() is None


def test_allocations_of_a_backward_pass_have_frames(frames_of) -> None:
    """Allocations in a backward pass have the frames of the code that started it."""
    weight = torch.ones(10, requires_grad=True)
    loss = (weight * 2).sum()

    def step() -> torch.Tensor | None:
        loss.backward()
        return weight.grad

    assert frames_of(step)[0][1] == "step"


def test_allocations_of_another_thread_have_its_frames(frames_of) -> None:
    """Allocations of another thread have that thread's frames, not those of a waiting one."""

    def work(found: list[torch.Tensor]) -> None:
        found.append(torch.zeros(10))

    def in_thread() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        thread = threading.Thread(target=work, args=(found,))
        thread.start()
        thread.join()
        return found

    names = [name for _, name in frames_of(in_thread)]
    assert names[0] == "work"
    assert "in_thread" not in names


def doubled(values: torch.Tensor) -> torch.Tensor:
    return values * 2


def forking(values: torch.Tensor) -> torch.Tensor:
    return torch.jit.wait(torch.jit.fork(doubled, values))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_thread_without_python_has_no_frames(counter: Counter, region: RegionCounter) -> None:
    """A thread of TorchScript has no Python frames; its allocations count without a line."""
    forks = torch.jit.script(forking)
    values = torch.ones(1000)
    forks(values)
    since = counter.figures().serial
    kept = forks(values)
    found = [one for one in counter.allocations_since(since) if one.key == kept.data_ptr()]
    assert [(one.bytes, one.recorded) for one in found] == [(4000, None)]


def test_without_a_region_no_frames_are_noted(counter: Counter) -> None:
    """Without an open region no frames are noted, so that an allocation costs next to nothing."""
    since = counter.figures().serial
    kept = torch.zeros(10)
    assert [one.recorded for one in counter.allocations_since(since)] == [None]
    del kept


def function_of(code: CodeType) -> Callable[[], torch.Tensor]:
    return FunctionType(code, {"torch": torch})


def test_code_is_referenced_until_the_last_region_ends(counter: Counter) -> None:
    """Code objects are kept until the last region ends, so that frames can be read at its end."""
    outer, inner = counter.open(), counter.open()
    code = (lambda: torch.zeros(5)).__code__.replace(co_name="mine")
    reference = weakref.ref(code)
    function_of(code)()
    del code
    inner.close()
    gc.collect()
    assert reference() is not None
    outer.close()
    gc.collect()
    assert reference() is None


def test_code_that_has_allocated_often_is_referenced_once(counter: Counter) -> None:
    """Code that allocates many times in a region is freed with it as well."""
    region = counter.open()
    code = (lambda: torch.zeros(5)).__code__.replace(co_name="mine")
    reference = weakref.ref(code)
    for _ in range(3):
        function_of(code)()
    del code
    region.close()
    gc.collect()
    assert reference() is None


def test_block_of_an_earlier_region_has_no_line_of_a_later_one(counter: Counter) -> None:
    """The lines of a region are forgotten with it: a block that is still live has none then."""
    since = counter.figures().serial
    kept = []
    for name in ("first", "second"):
        region = counter.open()
        code = (lambda: torch.UntypedStorage(5)).__code__.replace(co_name=name)
        kept.append(function_of(code)())
        found = counter.allocations_since(since)
        region.close()
    lines = [one.recorded and one.recorded.frames[0][0].co_name for one in found]
    assert lines == ["second", None]


@pytest.fixture
def collections_inside(counter: Counter) -> Iterator[list[int]]:
    """The number of allocations that had been counted when each collection began."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(counter.figures().serial)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.set_threshold(*before)


@pytest.mark.usefixtures("region")
def test_no_garbage_is_collected_while_frames_are_noted(
    counter: Counter, collections_inside: list[int]
) -> None:
    """Noting frames makes objects, but runs no finalizer of the user inside an allocation."""
    allocate = calling(["deep.py"] * 90)
    allocate()
    gc.collect()
    collections_inside.clear()
    serial = counter.figures().serial
    gc.set_threshold(40, 1000, 1000)
    kept = allocate()
    gc.set_threshold(0)
    assert serial not in collections_inside
    assert kept.numel() == 5


def test_backward_pass_is_known_below_a_deep_recursion(counter: Counter) -> None:
    """What a hook allocates is of the backward pass, also if the frames that say so are too far."""
    kept = []

    def allocate(depth: int) -> None:
        if depth:
            allocate(depth - 1)
        else:
            kept.append(torch.UntypedStorage(50_000))

    weight = torch.ones(10, requires_grad=True)
    weight.register_hook(lambda gradient: allocate(150))
    loss = weight.sum()
    region = counter.open()
    loss.backward()
    contexts = [group.context for group in region.at_peak() if group.bytes == 50_000]
    region.close()
    assert contexts == [Context.BACKWARD]


def test_survivors_have_their_frames_after_the_region(counter: Counter) -> None:
    """Frames of survivors are read at the end of a region and keep their code until then."""
    region = counter.open()
    since = region.serial
    kept = torch.zeros(5)
    survivors = counter.allocations_since(since)
    region.close()
    assert survivors[0].site is not None
    has_columns = hasattr(CodeType, "co_positions")  # not in Python 3.10: then the whole line
    assert survivors[0].site.code == ("torch.zeros(5)" if has_columns else "kept = torch.zeros(5)")
    del kept


@pytest.mark.slow
def test_seventy_thousand_functions_fill_the_tables_and_break_nothing(counter: Counter) -> None:
    """If the tables of frames are full, bytes still count, and known frames stay."""
    template = (lambda: torch.UntypedStorage(10)).__code__
    codes = [template.replace(co_name=f"f{number}") for number in range(70_000)]
    region = counter.open()
    since = region.serial
    early = function_of(codes[0])()
    middle = [function_of(code)() for code in codes[1:]][60_000]
    late = function_of(codes[-1])()
    again = function_of(codes[0])()
    found = counter.allocations_since(since)
    names = [one.recorded and one.recorded.frames[0][0].co_name for one in found]
    assert names == ["f0", None, "f60001", "f0"]
    groups = region.at_peak()
    assert sum(group.bytes for group in groups) == region.read().peak
    assert counter.retained_since(since) == 40
    region.close()
    del early, middle, late, again
