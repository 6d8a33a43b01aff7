"""The fake tensor mode of the predicted device: runs operators and reports their results."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from pytest_cka_memory.meters.predicted.extra_allocations import keep_unreduced
from pytest_cka_memory.meters.predicted.operator_cache import NOT_CACHED, OperatorCache
from pytest_cka_memory.meters.predicted.refusals import (
    is_unpredictable,
    refusal,
    refusal_of,
    refuse_lost_values,
)
from pytest_cka_memory.meters.torch_private import FakeTensor, FakeTensorMode

DEVICE_TYPE = "predicted"
"""The name of torch's device type, as in ``predicted:0``."""

OnOperator = Callable[[Any, tuple[Any, ...], list[FakeTensor]], None]
"""Called after each operator with it, its arguments and the predicted tensors that it returned."""


class PredictingMode(FakeTensorMode):
    """Runs operators on fake tensors, and reports each to the device of its results."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.callbacks: dict[int, OnOperator] = {}
        """By device index."""
        self._operator_cache = OperatorCache(self)
        self._inside = False
        self._lock = threading.RLock()  # FakeTensorMode is not thread-safe

    @property
    def avoid_device_init(self) -> bool:
        """Keep the mode from initializing a device that cannot be initialized."""
        return True

    @avoid_device_init.setter
    def avoid_device_init(self, value: bool) -> None:
        pass

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        with self._lock:
            if self._inside:  # the shape rule of an operator calls other operators
                return super().__torch_dispatch__(func, types, args, kwargs)
            self._inside = True
            try:
                result = self._run_operator(func, types, args, kwargs)
            except RuntimeError as error:
                if not is_unpredictable(error):
                    raise
                raise refusal_of(func, error) from None
            finally:
                self._inside = False
                # model.to() cannot swap tensors that this memo references weakly.
                self.fake_tensor_converter.meta_converter.tensor_memo.clear()
            self._report_result(func, args, result)
            return result

    def _run_operator(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        key = self._operator_cache.key(func, args, kwargs)
        if key is not None:
            known = self._operator_cache.lookup(key, args, kwargs)
            if known is not NOT_CACHED:
                return known
        refuse_lost_values(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        keep_unreduced(func.name(), args, result)
        if key is not None:
            self._operator_cache.store(key, func, args, kwargs, result)
        return result

    def _report_result(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        by_index: dict[int, list[FakeTensor]] = {}
        for tensor in _fakes_in(result):
            if tensor.fake_device.type == DEVICE_TYPE:
                by_index.setdefault(tensor.fake_device.index or 0, []).append(tensor)
        for index, tensors in by_index.items():
            if index not in self.callbacks:
                raise refusal(
                    f"{DEVICE_TYPE}:{index}", "there is no such card", "Use cka_memory.device"
                )
            self.callbacks[index](func, args, tensors)

    def __deepcopy__(self, memo: object) -> "PredictingMode":
        """Return the mode itself, which ``copy.deepcopy(model)`` would otherwise copy."""
        return self


def _fakes_in(value: Any) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _fakes_in(one)
