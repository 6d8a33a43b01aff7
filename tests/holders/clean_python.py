"""Clean programs by feature of Python: loops, exceptions, threads, suspended code, hooks."""

import contextlib
import copy
import functools
import gc
import io
import itertools
import logging
import pickle
import threading
import warnings
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from clean import BATCHES, Running, Table, clean
from torch import nn

PYTHON: Table = []
OLD = torch.ones(500)


def batch() -> torch.Tensor:
    return torch.ones(250)


@clean(PYTHON)
def cycle_that_is_collected() -> Running:
    yield
    ring: list[Any] = [batch()]
    ring.append(ring)


@clean(PYTHON)
def cycle_each_batch() -> Running:
    yield
    for _ in range(BATCHES):
        ring: list[Any] = [batch()]
        ring.append(ring)
        del ring
        yield


@clean(PYTHON)
def automatic_collection_switched_off() -> Running:
    yield
    gc.disable()
    try:
        for _ in range(BATCHES):
            ring: list[Any] = [batch()]
            ring.append(ring)
            yield
        del ring
    finally:
        gc.enable()


@clean(PYTHON)
def warm_up_step() -> Running:
    yield
    buffers: dict[int, torch.Tensor] = {}
    for _ in range(BATCHES):
        buffers.setdefault(250, torch.zeros(250)).add_(batch())
        yield


@clean(PYTHON)
def alternating_buffers() -> Running:
    yield
    buffers = [torch.ones(100), torch.ones(300)]
    for number in range(BATCHES):
        buffers[number % 2] = torch.ones(100 + 200 * (number % 2))
        yield


@clean(PYTHON)
def window_of_recent_losses() -> Running:
    yield
    recent: deque[torch.Tensor] = deque(maxlen=3)
    for _ in range(2 * BATCHES):
        recent.append(batch().sum())
        yield


@clean(PYTHON)
def loop_over_zip() -> Running:
    yield
    for left, right in zip((batch() for _ in range(BATCHES)), itertools.repeat(OLD)):
        assert len(left) < len(right)
        yield


@clean(PYTHON)
def loop_over_enumerate() -> Running:
    yield
    for number, x in enumerate(batch() for _ in range(BATCHES)):
        assert number < len(x)
        yield


@clean(PYTHON)
def exception_handled_inside() -> Running:
    yield
    x = batch()
    try:
        raise ValueError(x)
    except ValueError as error:
        assert error.args[0] is x  # noqa: PT017 (the exception handled is the program)


@clean(PYTHON)
def exception_in_an_operator() -> Running:
    yield
    with contextlib.suppress(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)


@clean(PYTHON)
def exception_expected_by_pytest() -> Running:
    yield
    with pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)


@clean(PYTHON)
def thread_that_ended() -> Running:
    yield
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda x: results.append(x * 2), args=(batch(),))
    thread.start()
    thread.join()


@clean(PYTHON)
def pool_of_threads() -> Running:
    yield
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(torch.ones, [250] * 8))
    assert len(results) == 8


@clean(PYTHON)
def pool_that_outlives_the_region() -> Running:
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    yield
    for _ in range(BATCHES):
        assert pool.submit(batch).result() is not None
        yield
    pool.shutdown()


@clean(PYTHON)
def thread_local_of_a_thread_that_ended() -> Running:
    local = threading.local()
    yield
    thread = threading.Thread(target=lambda: setattr(local, "x", batch()))
    thread.start()
    thread.join()


@clean(PYTHON)
def generator_closed() -> Running:
    yield
    generator = (x * number for number, x in enumerate(itertools.repeat(batch(), 5)))
    next(generator)
    generator.close()


@clean(PYTHON)
def context_managers() -> Running:
    yield
    with contextlib.ExitStack() as stack:
        stack.callback(len, batch())
        stack.enter_context(contextlib.nullcontext(batch()))


@clean(PYTHON)
def cache_cleared() -> Running:
    cached = functools.lru_cache(torch.ones)
    yield
    cached(250)
    cached.cache_clear()


@clean(PYTHON)
def weak_references() -> Running:
    seen = weakref.WeakSet[torch.Tensor]()
    by_name = weakref.WeakValueDictionary[str, torch.Tensor]()
    yield
    by_name["x"] = x = batch()
    seen.add(x)


@clean(PYTHON)
def deep_copy_dropped() -> Running:
    model = nn.Linear(5, 5)
    yield
    assert copy.deepcopy(model) is not model


@clean(PYTHON)
def pickled() -> Running:
    yield
    for _ in range(BATCHES):
        assert pickle.loads(pickle.dumps(batch())).sum() == 250
        yield


@clean(PYTHON)
def state_saved_and_loaded() -> Running:
    model = nn.Linear(5, 5)
    yield
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


@clean(PYTHON)
def storage_in_a_cycle_that_its_tensor_outlives() -> Running:
    old = torch.ones(250)
    yield
    ring: list[Any] = [old.untyped_storage()]
    ring.append(ring)


@clean(PYTHON)
def warnings_captured() -> Running:
    yield
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn(UserWarning("odd", batch()), stacklevel=1)
    assert len(caught) == 1


@clean(PYTHON)
def warned_once_from_here() -> Running:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.warn(UserWarning("odd", batch()), stacklevel=1)


@clean(PYTHON)
def logged_as_text() -> Running:
    text = io.StringIO()
    logger = logging.Logger("clean")
    logger.addHandler(logging.StreamHandler(text))
    yield
    logger.warning("loss %s", batch().sum())
    assert "250" in text.getvalue()


@clean(PYTHON)
def patched_and_put_back() -> Running:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytest, "planted", batch(), raising=False)
        patch.setitem(vars(torch), "planted", batch())


@clean(PYTHON)
def old_tensor_replaced_by_a_smaller() -> Running:
    kept = {"x": torch.ones(500)}
    yield
    kept["x"] = kept["x"][:0]
    yield
