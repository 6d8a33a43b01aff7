"""Which operators need a cuBLAS workspace, its size, and whether PyTorch keeps it.

Like PyTorch, a prediction reads the environment variables ``TORCH_CUBLAS_WORKSPACE_CACHE``,
``TORCH_CUBLASLT_UNIFIED_WORKSPACE``, ``CUBLAS_WORKSPACE_CONFIG`` and ``CUBLASLT_WORKSPACE_SIZE``;
see aten/src/ATen/cuda/CublasHandlePool.cpp.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cka_memory.core.cards import LT_WORKSPACE_BYTES

_KEPT_BEFORE = (2, 15)
"""From this torch version on, a workspace is freed after its operator (2.13 still kept it)."""

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")
)
_OTHERS = frozenset(
    f"aten::{name}"
    for name in (
        "_euclidean_dist",  # from cdist
        "_trilinear",  # from bilinear
        "addbmm",
        "linalg_solve_triangular",
        "triangular_solve",
    )
)
"""Operators that call cuBLAS inside."""
_BIASED = frozenset(f"aten::{name}" for name in ("addmm", "_addmm_activation"))
_USED_WITHOUT_ELEMENTS = frozenset(
    f"aten::{name}" for name in ("dot", "vdot", "linalg_solve_triangular")
)
"""They ask for a workspace before they look at the sizes."""


@dataclass(frozen=True)
class Workspaces:
    """PyTorch's rules for workspaces on one card."""

    cublas_bytes: int
    lt_bytes: int
    kept: bool
    """Whether a stream's workspace stays allocated until ``_cuda_clearCublasWorkspaces``."""
    shared: bool
    """Whether cuBLASLt uses the workspace of cuBLAS; only if workspaces are kept."""

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], torch_version: str, card_bytes: int
    ) -> "Workspaces":
        """Return the rules for a torch version and its environment variables."""
        kept = _flag(environ.get("TORCH_CUBLAS_WORKSPACE_CACHE"))
        if kept is None:
            kept = tuple(map(int, re.findall(r"\d+", torch_version)[:2])) < _KEPT_BEFORE
        lt = environ.get("CUBLASLT_WORKSPACE_SIZE", "")
        return cls(
            cublas_bytes=_configured(environ.get("CUBLAS_WORKSPACE_CONFIG", ""), card_bytes),
            lt_bytes=int(lt) * 1024 if lt.isdecimal() else LT_WORKSPACE_BYTES,
            kept=kept,
            shared=kept and _flag(environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")) is not False,
        )

    def needed_by(self, operator: str, shapes: Sequence[Sequence[int]]) -> tuple[str, int] | None:
        """Return the library and the size of the workspace of an operator; None if it needs none.

        Args:
            operator: its name, for example ``aten::addmm``.
            shapes: the shapes of its tensors, in order.
        """
        operator = operator.rstrip("_")  # the name of an in-place operator ends with an underscore
        if not (operator in _PRODUCTS or operator in _BIASED or operator in _OTHERS):
            return None
        is_empty = any(0 in shape for shape in shapes)
        if is_empty and operator not in _USED_WITHOUT_ELEMENTS:
            return None
        if not (operator in _BIASED and _takes_lt(shapes)):
            return "cuBLAS", self.cublas_bytes
        if self.shared:
            return "cuBLAS", max(self.cublas_bytes, self.lt_bytes)
        return "cuBLASLt", self.lt_bytes


def _takes_lt(shapes: Sequence[Sequence[int]]) -> bool:
    """Whether ``addmm`` runs in cuBLASLt (``addmm_out_cuda_impl``, ``useLtInterface``)."""
    bias, _, weight = shapes
    return len(bias) == 1 and bias[0] == weight[1] and weight[0] > 1 and weight[1] > 1


def _flag(value: str | None) -> bool | None:
    return {"0": False, "1": True}.get(value or "")  # PyTorch ignores other values


def _configured(text: str, default: int) -> int:
    pairs = re.findall(r":([0-9]+):([0-9]+)", text)
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else default
