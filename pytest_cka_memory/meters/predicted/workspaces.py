"""Which operators make cuBLAS take a workspace, how large, and whether PyTorch keeps it.

PyTorch reads the environment for this, and so does a prediction: ``TORCH_CUBLAS_WORKSPACE_CACHE``,
``TORCH_CUBLASLT_UNIFIED_WORKSPACE``, ``CUBLAS_WORKSPACE_CONFIG``, ``CUBLASLT_WORKSPACE_SIZE``; see
aten/src/ATen/cuda/CublasHandlePool.cpp.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_cka_memory.meters.predicted.cards import LT_WORKSPACE_BYTES

_KEPT_BEFORE = (2, 15)
"""From this torch on a workspace lives as long as its operator (2.13 still kept it)."""

_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot")
)
_BIASED = "aten::addmm"


@dataclass(frozen=True)
class Workspaces:
    """PyTorch's rules on one card."""

    cublas_bytes: int
    lt_bytes: int
    kept: bool
    """Whether a stream's workspace stays until ``_cuda_clearCublasWorkspaces``."""
    shared: bool
    """Whether cuBLASLt uses that of cuBLAS; only where it is kept."""

    @classmethod
    def by(cls, environ: Mapping[str, str], torch_version: str, card_bytes: int) -> "Workspaces":
        """The rules of a torch with these environment variables."""
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

    def of(self, operator: str, shapes: Sequence[Sequence[int]]) -> tuple[str, int] | None:
        """Whose workspace an operator takes and its bytes; None for most operators.

        `operator` is as ``aten::addmm``, `shapes` those of its tensors in order.
        """
        operator = operator.rstrip("_")  # in place or not
        if operator not in _PRODUCTS:
            return None
        if not (operator == _BIASED and _takes_lt(shapes)):
            return "cuBLAS", self.cublas_bytes
        if self.shared:
            return "cuBLAS", max(self.cublas_bytes, self.lt_bytes)
        return "cuBLASLt", self.lt_bytes


def _takes_lt(shapes: Sequence[Sequence[int]]) -> bool:
    """A bias added by the product's own epilogue: ``addmm_out_cuda_impl``, ``useLtInterface``."""
    bias, _, weight = shapes
    return len(bias) == 1 and bias[0] == weight[1] and weight[0] > 1 and weight[1] > 1


def _flag(value: str | None) -> bool | None:
    return {"0": False, "1": True}.get(value or "")  # anything else PyTorch ignores


def _configured(text: str, default: int) -> int:
    pairs = re.findall(r":([0-9]+):([0-9]+)", text)
    return sum(int(size) * 1024 * int(count) for size, count in pairs) if pairs else default
