"""Files that were there before a program without values: they are kept.

What such a program saves are zeros. A training that is run for its memory alone would write them
over the weights of an earlier one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from emulated_cuda import imports

SUFFIX = ".no-values"
"""What is added to the name of a file that takes the place of another."""
_own: dict[str, str] = {}
"""Path that the program named -> where its contents went."""


def keep_existing_files() -> None:
    """Let ``torch.save`` and safetensors write beside a file that exists, instead of over it.

    ``torch.load`` and safetensors read in the same process what was written there.
    """
    imports.call_after("torch", _in_torch)
    imports.call_after("safetensors.torch", _in_safetensors)


def _in_torch() -> None:
    import torch

    torch.save = _to_own(torch.save, position=1, keyword="f")
    torch.load = _from_own(torch.load, keyword="f")


def _in_safetensors() -> None:
    import safetensors.torch as safetensors

    safetensors.save_file = _to_own(safetensors.save_file, position=1, keyword="filename")
    safetensors.load_file = _from_own(safetensors.load_file, keyword="filename")


def _to_own(function: Callable[..., Any], position: int, keyword: str) -> Callable[..., Any]:
    @wraps(function)
    def save(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _own_path(args[position]), *args[position + 1 :])
        elif keyword in kwargs:
            kwargs[keyword] = _own_path(kwargs[keyword])
        return function(*args, **kwargs)

    return save


def _from_own(function: Callable[..., Any], keyword: str) -> Callable[..., Any]:
    @wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_written(args[0]), *args[1:])
        elif keyword in kwargs:
            kwargs[keyword] = _written(kwargs[keyword])
        return function(*args, **kwargs)

    return load


def _own_path(file: Any) -> Any:
    """Return where to write what a program saves in `file`, which is often a path."""
    if not isinstance(file, (str, os.PathLike)):
        return file
    path = os.path.abspath(os.fsdecode(file))
    if path not in _own:
        exists = os.path.isfile(path) and not path.endswith(SUFFIX)
        _own[path] = path + SUFFIX if exists else path
        if exists:
            print(
                f"emulated_cuda: no values are computed, so {os.fsdecode(file)} is kept, and the "
                f"zeros that would replace it are saved in {os.fsdecode(file)}{SUFFIX}",
                file=sys.stderr,
            )
    return file if _own[path] == path else _own[path]


def _written(file: Any) -> Any:
    if not isinstance(file, (str, os.PathLike)):
        return file
    path = os.path.abspath(os.fsdecode(file))
    return file if _own.get(path, path) == path else _own[path]
