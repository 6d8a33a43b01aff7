"""Faulty tests that patch or change what the plugin and its meters call."""

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from faulty_base import KEPT, Fault, _clear_kept, keep
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

__all__ = ["_clear_kept"]  # a fixture


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _broken(*args: object, **kwargs: object) -> None:
    raise AssertionError("the plugin called what a test had patched")


def _wrapped(function: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *args: function(*args)


class TestTorchPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = torch.zeros
        for name in ("empty", "zeros", "ones", "tensor", "is_tensor", "typename"):
            monkeypatch.setattr(torch, name, _broken)
        for name in ("__add__", "__eq__", "numel", "element_size", "untyped_storage", "size"):
            monkeypatch.setattr(torch.Tensor, name, _broken)
        KEPT.append(plain(100, dtype=torch.uint8))


class TestDispatchPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("TorchDispatchMode", "is_traceable_wrapper_subclass", "_push_mode"):
            monkeypatch.setattr(torch.utils._python_dispatch, name, _broken)
        keep()


class TestThreadsPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = threading.Thread.start
        monkeypatch.setattr(threading.Thread, "start", lambda thread: plain(thread))
        in_thread(keep)

    def test_a_thread_after(self) -> None:
        in_thread(keep)

    def test_another_thread_after(self) -> None:
        in_thread(keep)


class TestResizingPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = torch.UntypedStorage.resize_
        patched = lambda storage, size: plain(storage, size)  # noqa: E731
        monkeypatch.setattr(torch.UntypedStorage, "resize_", patched)
        torch.UntypedStorage(0).resize_(10)
        keep()

    def test_a_resize_after(self) -> None:
        keep(50)
        KEPT[0].untyped_storage().resize_(100)  # type: ignore[attr-defined]


class TestCollectorPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gc, "collect", lambda *_: 0)
        cycle: list[object] = [torch.zeros(4000, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        keep()


class TestCollectorCallbacksCleared(Fault):
    def test_it(self) -> None:
        gc.callbacks.clear()
        keep()


class TestPythonPatched(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("builtins.open", _broken)
        monkeypatch.setattr("builtins.isinstance", _wrapped(isinstance))
        monkeypatch.setattr(os, "environ", {})
        keep()


class TestModulesForgotten(Fault):
    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] == "pytest_cka_memory":
                monkeypatch.delitem(sys.modules, name)
        keep()


class TestTorchHidden(Fault):
    """Tests do this to check what happens if torch is not installed."""

    def test_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError):
            importlib.import_module("torch")
        keep()


class TestModeLeftOn(Fault):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    mode = Mode()

    @classmethod
    def teardown_class(cls) -> None:
        cls.mode.__exit__(None, None, None)

    def test_it(self) -> None:
        self.mode.__enter__()
        keep()

    def test_it_stays_on(self) -> None:
        assert _get_current_dispatch_mode_stack()[-1] is self.mode


class TestDefaultsChanged(Fault):
    @classmethod
    def teardown_class(cls) -> None:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)

    def test_it(self) -> None:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        keep()


class TestCachesEmptied(Fault):
    def test_it(self) -> None:
        torch.cuda.empty_cache()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces() if torch.cuda.is_available() else None
        keep()
