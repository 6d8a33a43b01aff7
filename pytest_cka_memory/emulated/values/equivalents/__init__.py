"""CPU forms of operators that only CUDA has."""
from typing import Any
from collections.abc import Callable
EQUIVALENTS: dict[str, Callable[..., Any]] = {}
