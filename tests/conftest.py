"""For every test: the pytester fixture, and the markers of what not every machine can run."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest_plugins = ["pytester"]

# Workers share the cores: threads of each for all of them would spend their time on waiting.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_BESIDE = ("asyncio", "cov", "randomly", "repeat")


@pytest.fixture
def pytester(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Inner sessions without the plugins that are installed to be tested beside: -p brings one."""
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(f"-p no:{name}" for name in _BESIDE))
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)  # the job's own summary is none of theirs
    return pytester


@pytest.fixture
def fail_late() -> Iterator[Callable[[Any], None]]:
    """Have a backward pass on a device fail, in a thread that is the last to be given its turn."""
    torch = pytest.importorskip("torch")
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("this system has no threads that wait for all others")
    everywhere, interval = os.sched_getaffinity(0), sys.getswitchinterval()
    one = {min(everywhere)}
    threads = []

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Any) -> Any:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            threads.append(threading.get_native_id())
            os.sched_setaffinity(threads[-1], one)
            os.sched_setscheduler(threads[-1], os.SCHED_IDLE, os.sched_param(0))
            raise RuntimeError("this pass fails")

    def fail(device: Any) -> None:
        loss = Failing.apply(torch.ones(1000, device=device, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="this pass fails"):
            loss.backward()

    os.sched_setaffinity(0, one)
    sys.setswitchinterval(1000)
    yield fail
    sys.setswitchinterval(interval)
    os.sched_setaffinity(0, everywhere)
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        os.sched_setaffinity(thread, everywhere)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine or this torch has not got, and say why."""
    for marker, has, missing in (
        ("gpu", _has_accelerator, "needs an accelerator; torch finds none here"),
        ("predicts", _can_predict, "this torch cannot set up a device to predict on"),
    ):
        needing = [item for item in items if item.get_closest_marker(marker) is not None]
        if needing and not has():
            for item in needing:
                item.add_marker(pytest.mark.skip(reason=missing))


def _has_accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _can_predict() -> bool:
    from torch.utils import backend_registration

    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
