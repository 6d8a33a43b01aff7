"""The search for holders changes nothing, runs no code of the user, and no object stops it."""

import gc
import importlib.util
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import planted
import pytest
import refusing_objects
import torch
from planted import KEEP, cleaned_up
from searched import held_by_cpp, leaking, path_to
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.holders.expressions import without_places

SHOWS_SAVED = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"),
    reason="this torch version shows a saved tensor only after running the user's unpack hook",
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with cleaned_up():
        yield


class TestNothingIsChanged:
    def test_a_region_after_a_search_retains_nothing(self) -> None:
        """What a search found is freed with the user's last
        reference, so a later region is clean.
        """
        leaking(lambda x: [x])
        with MemoryProbe("cpu").measure() as region:
            KEEP.clear()
        assert region.retained_bytes == 0
        assert region.net_bytes == -1000

    def test_a_found_tensor_is_freed_with_its_last_reference(self) -> None:
        """A tensor that was found is freed with its last
        reference, and its storage too, at once.
        """
        region = leaking(lambda x: {"x": x})
        gc.disable()
        try:
            tensor = weakref.ref(KEEP[0]["x"])
            storage = weakref.ref(tensor().untyped_storage())  # type: ignore[union-attr]
            KEEP.clear()
            assert tensor() is storage() is None
        finally:
            gc.enable()
        assert region.retained[0].bytes == 1000

    def test_locals_of_a_running_frame_are_not_kept_alive(self) -> None:
        """A local that is deleted after the search is freed, although the search has read it."""
        with MemoryProbe("cpu").measure() as region:
            x = torch.ones(250)
        assert "x in test_locals_of_a_running_frame" in str(region.retained[0].held_by)
        reference = weakref.ref(x)
        del x
        assert reference() is None

    def test_the_dict_that_locals_returned_is_not_changed(self) -> None:
        """Before Python 3.13 a frame has one dict of locals, which the search must not change."""
        before = 1
        scope = locals()
        with MemoryProbe("cpu").measure() as region:
            KEEP.append(torch.ones(250))
        assert region.retained
        assert scope["before"] == before

    def test_garbage_collection_stays_enabled_or_disabled(self) -> None:
        """The search disables garbage collection while it runs and
        restores its state afterwards.
        """
        leaking(lambda x: [x])
        assert gc.isenabled()
        gc.disable()
        try:
            leaking(lambda x: [x])
            assert not gc.isenabled()
        finally:
            gc.enable()


class TestNoUserCodeRuns:
    @pytest.mark.parametrize(
        ("make", "path"),
        [
            (refusing_objects.Refusing, "planted.KEEP[0].x"),
            (refusing_objects.of_refusing_type, "planted.KEEP[0].x"),
            (lambda x: refusing_objects.LyingDict(x=x), "planted.KEEP[0]['x']"),
            (lambda x: refusing_objects.LyingList([0, x]), "planted.KEEP[0][1]"),
            (refusing_objects.PosingAsDict, "planted.KEEP[0].x"),
            (refusing_objects.CountingReads, "planted.KEEP[0]"),
        ],
        ids=["refusing", "refusing-class", "dict", "list", "posing", "computing"],
    )
    def test_objects_that_raise_or_lie_on_access_are_searched(self, make: Any, path: str) -> None:
        """Objects whose methods raise or lie are searched, because their fields are read from
        memory.
        """
        assert path_to(make).startswith(path)
        assert refusing_objects.CountingReads.reads == 0

    def test_modes_of_the_user_see_no_call_of_the_search(self) -> None:
        """A user's function or dispatch mode sees no call of the
        search, even for sparse tensors.
        """
        calls: list[Any] = []

        class FunctionMode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                calls.append(func)
                return func(*args, **(kwargs or {}))

        class DispatchMode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                calls.append(func)
                return func(*args, **(kwargs or {}))

        KEEP.append(torch.ones(3, requires_grad=True).exp())
        with MemoryProbe("cpu").measure() as region:
            KEEP.append(torch.eye(5).to_sparse())
        with FunctionMode(), DispatchMode():
            assert "planted.KEEP[1]" in str(region.retained)
        assert not calls

    def test_a_key_of_an_unusual_type_is_written_as_its_type(self) -> None:
        """A key of an unusual type is written as its type; its own ``__repr__`` does not run."""

        class Key(str):
            __slots__ = ()

            def __repr__(self) -> str:
                raise SystemExit("accessed")

        assert path_to(lambda x: {Key("a"): x}) == "planted.KEEP[0][<Key>]"

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            (torch.Size([100, 2]), "[torch.Size([100, 2])]"),
            (torch.float32, "[torch.float32]"),
            ((torch.device("cpu"), 1), "[(torch.device('cpu'), 1)]"),
        ],
        ids=["size", "dtype", "device"],
    )
    def test_a_key_of_torch_is_written_as_code(self, key: Any, text: str) -> None:
        """A key such as a dtype is written as code, and left out of patterns of similar entries."""
        assert path_to(lambda x: {key: x}) == f"planted.KEEP[0]{text}"
        assert without_places(f"KEEP{text}.grad") == "KEEP[].grad"

    def test_keys_and_elements_are_written_as_code(self) -> None:
        """A path contains keys and elements as code that a user can
        type, since they have no index.
        """
        for hold in (lambda x: {"first": 1, x: 2}, lambda x: {x}, lambda x: frozenset((x,))):
            found = eval(path_to(hold), {"planted": planted})
            assert isinstance(found, torch.Tensor)
            assert found in KEEP.pop()

    def test_a_dead_weak_proxy_is_skipped(self) -> None:
        """A weak proxy whose object is dead raises at any access, so the search skips it."""
        KEEP.append(weakref.proxy(threading.Event()))
        with MemoryProbe("cpu").measure() as region:
            KEEP.append(torch.ones(250))
        assert region.retained[0].held_by == "planted.KEEP[1]"

    def test_a_lazy_module_stays_unloaded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The search reads the globals of modules without
        importing any module that loads lazily.
        """
        source = tmp_path / "planted_lazily.py"
        source.write_text("raise SystemExit('loaded')", "utf-8")
        spec = importlib.util.spec_from_file_location(
            "planted_lazily", source, loader=importlib.util.LazyLoader(Loader(source))
        )
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "planted_lazily", module)
        assert spec.loader is not None
        spec.loader.exec_module(module)
        names = set(sys.modules)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            leaking(lambda x: [x])
        assert set(sys.modules) == names

    def test_an_object_in_sys_modules_that_raises_on_access_is_skipped(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """``sys.modules`` may contain anything, so an object in it that raises is skipped."""
        monkeypatch.setitem(sys.modules, "planted_refusing", refusing_objects.Refusing(None))  # type: ignore[arg-type]
        leaking(lambda x: [x])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("folder", "held_by"),
        [
            ("site-packages", "planted.KEEP[0][0]"),
            ("dist-packages", "planted.KEEP[0][0]"),
            ("project", "planted_elsewhere.STORE"),
        ],
    )
    def test_a_package_of_any_site_folder_is_named_only_if_the_user_does_not_hold_the_tensor(
        self, folder: str, held_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A package of another environment is named only if no
        module of the user holds the tensor.
        """
        module: Any = ModuleType("planted_elsewhere")
        module.__file__ = str(tmp_path / folder / "planted_elsewhere.py")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with MemoryProbe("cpu").measure() as region:
            module.STORE = torch.ones(250)
            KEEP.append([module.STORE])
        assert [holding.held_by for holding in region.retained] == [held_by]

    @SHOWS_SAVED
    def test_unpack_hooks_of_saved_tensors_do_not_run(self) -> None:
        """Unpack hooks of saved tensors may compute anything, so the search does not run them."""
        weight = torch.ones(250, requires_grad=True)

        def refuse(_: Any) -> Any:
            raise SystemExit("unpacked")

        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(),), refuse)
        with MemoryProbe("cpu").measure() as region, hooks:
            KEEP.append(weight.exp())
        paths = {holding.held_by for holding in region.retained}
        assert "planted.KEEP[0].grad_fn._raw_saved_result.data[0]" in paths


class Slots:
    """An object with slots, one of which has no value."""

    __slots__ = ("empty", "kept")

    def __init__(self, x: torch.Tensor) -> None:
        self.kept = x


class Squared(torch.autograd.Function):
    """A user's autograd function; reading its saved tensors raises after they are freed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class TestUnusualObjects:
    def test_an_empty_slot_is_skipped(self) -> None:
        """Reading an empty slot raises AttributeError, so the search skips it."""
        assert path_to(Slots) == "planted.KEEP[0].kept"

    @pytest.mark.native  # the callbacks of a future are read by the compiled library
    def test_a_graph_after_its_backward_pass_is_searched(self) -> None:
        """Saved tensors that a backward pass freed raise if they
        are read; the graph is searched.
        """
        weight = torch.ones(250, requires_grad=True)
        future: torch.futures.Future[Any] = torch.futures.Future()
        with MemoryProbe("cpu").measure() as region:
            KEEP.append(Squared.apply(weight))
            KEEP[0].sum().backward()
            future.add_done_callback(held_by_cpp(torch.ones(100)))  # so everything is searched
        held = {(holding.bytes, str(holding.held_by)[:15]) for holding in region.retained}
        assert {(400, "a function that"), (1000, "planted.KEEP[0]")} < held

    def test_a_view_whose_graph_cannot_be_read_is_skipped(self) -> None:
        """A view whose base was changed in place may raise at its
        ``grad_fn``, so this is skipped.
        """
        base = torch.ones(250, requires_grad=True).clone()
        with torch.no_grad():
            view = base[:2]
        base.mul_(2)
        with pytest.raises(RuntimeError, match="in no_grad mode"):
            _ = view.grad_fn
        KEEP.append(view)
        assert leaking(lambda x: [x]).retained[0].held_by == "planted.KEEP[1][0]"

    def test_a_view_whose_graph_cannot_be_read_is_found(self) -> None:
        """A view whose graph cannot be read is found if it is the
        only holder of retained memory.
        """

        def view_without_graph(x: torch.Tensor) -> torch.Tensor:
            base = x.requires_grad_().clone()
            with torch.no_grad():
                view = base[:2]
            base.mul_(2)
            return view

        with MemoryProbe("cpu").measure() as region:
            KEEP.append(view_without_graph(torch.ones(250)))
        assert "planted.KEEP[0]" in {holding.held_by for holding in region.retained}


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, path: Path) -> None:
        super().__init__("planted_lazily", str(path))
