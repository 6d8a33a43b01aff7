"""The fake tensor mode of the predicted device: answers operators, and tells of what they made."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from pytest_cka_memory.meters.predicted.refusals import (
    is_unknowable,
    refusal,
    refusal_of,
    refuse_lost_values,
)
from pytest_cka_memory.meters.predicted.replay import UNKNOWN, Replay
from pytest_cka_memory.meters.torch_private import FakeTensor, FakeTensorMode

DEVICE_TYPE = "predicted"
"""What torch calls the device: ``predicted:0``."""

Seen = Callable[[Any, tuple[Any, ...], list[FakeTensor]], None]
"""Told of each operator: the operator, its arguments, and the predicted tensors it returned."""


class PredictingMode(FakeTensorMode):
    """Runs operators on fake tensors, and tells of each once it has."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self.seen: dict[int, Seen] = {}
        """Device index -> who is told."""
        self._replay = Replay(self)
        self._inside = False
        self._lock = threading.RLock()  # a fake tensor mode itself is for one thread

    @property
    def avoid_device_init(self) -> bool:
        """Else the mode would start a device that has no start."""
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
            if self._inside:  # an operator's shape rule, written in operators
                return super().__torch_dispatch__(func, types, args, kwargs)
            self._inside = True
            try:
                result = self._answer(func, types, args, kwargs)
            except RuntimeError as error:
                if not is_unknowable(error):
                    raise
                raise refusal_of(func, error) from None
            finally:
                self._inside = False
                # What it refers to weakly, model.to() cannot swap.
                self.fake_tensor_converter.meta_converter.tensor_memo.clear()
            self._tell(func, args, result)
            return result

    def _answer(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        key = self._replay.key(func, args, kwargs)
        if key is not None:
            known = self._replay.answer(key, args, kwargs)
            if known is not UNKNOWN:
                return known
        refuse_lost_values(func, args, kwargs)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if key is not None:
            self._replay.learn(key, func, args, kwargs, result)
        return result

    def _tell(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        by_index: dict[int, list[FakeTensor]] = {}
        for tensor in _fakes_in(result):
            if tensor.fake_device.type == DEVICE_TYPE:
                by_index.setdefault(tensor.fake_device.index or 0, []).append(tensor)
        for index, tensors in by_index.items():
            if index not in self.seen:
                raise refusal(
                    f"{DEVICE_TYPE}:{index}", "there is no such card", "write cka_memory.device"
                )
            self.seen[index](func, args, tensors)

    def __deepcopy__(self, memo: object) -> "PredictingMode":
        """Copies of a tensor are of the same mode; ``copy.deepcopy(model)`` would copy it too."""
        return self


def _fakes_in(value: Any) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _fakes_in(one)
