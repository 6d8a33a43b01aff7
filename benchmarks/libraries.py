"""The CKA libraries that are compared: the packages to install and the documented call of each."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import emulated_cuda


@dataclass(frozen=True)
class Library:
    """A published library, or the bundled one."""

    name: str
    folder: str | None
    """Its own folder, because several are imported as `cka`; None for the bundled library."""
    requirements: tuple[str, ...]
    """Packages for that folder, without dependencies, because all must use the same torch."""
    compare: Callable[[nn.Module, Iterable[Any], torch.device], object]
    """Compare every layer of a model with every layer of it."""


def _with_block(
    model: nn.Module, loader: Iterable[Any], device: torch.device, **options: Any
) -> object:
    """Compare by the notebook's call, which the bundled library and pytorch-cka 0.1.3 accept."""
    from cka import CKA

    with CKA(model, model, device=device, **options) as comparison:
        return comparison.compare(loader, progress=False)


def _compute_cka(model: nn.Module, loader: Iterable[Any], device: torch.device) -> object:
    from cka import compute_cka  # type: ignore[attr-defined]  # pytorch-cka 1

    return compute_cka(model, model, loader, device=device, progress=False)


def _torch_cka(model: nn.Module, loader: Iterable[Any], device: torch.device) -> object:
    from torch_cka import CKA  # type: ignore[import-not-found]

    comparison = CKA(model, model, model1_name="one", model2_name="other", device=device)
    # After the last batch it refuses NaN, which is what a device without values leads to.
    refusal: AbstractContextManager[None] = (
        suppress(AssertionError) if emulated_cuda.loaded() is not None else nullcontext()
    )
    with torch.no_grad(), refusal:
        comparison.compare(loader, loader)
    return comparison


def _cka_pytorch(model: nn.Module, loader: Iterable[Any], device: torch.device) -> object:
    from cka_pytorch import CKACalculator  # type: ignore[import-not-found]

    calculator = CKACalculator(model, model, device=device, verbose=False)
    return calculator.calculate_cka_matrix(loader, num_epochs=1)


_PYTORCH_CKA_1 = ("pytorch-cka==1.1.3",)

AS_THE_NOTEBOOK = Library(
    "pytorch-cka 1.1.3, the notebook's call", "pytorch_cka_113", _PYTORCH_CKA_1, _with_block
)
"""The newest release with the call of the notebook, to check whether it accepts that call."""

LIBRARIES = {
    library.name: library
    for library in (
        Library("ours", None, (), _with_block),
        Library("ours, hsic_batch_size=64", None, (), partial(_with_block, hsic_batch_size=64)),
        Library("pytorch-cka 0.1.3", "pytorch_cka_013", ("pytorch-cka==0.1.3",), _with_block),
        Library("pytorch-cka 1.1.3", "pytorch_cka_113", _PYTORCH_CKA_1, _compute_cka),
        Library(
            "cka-pytorch 1.1.3",
            "cka_pytorch",
            (
                "cka-pytorch==1.1.3",
                "lightning",
                "lightning-utilities",
                "torchmetrics",
                "seaborn",
                "pyyaml",
                "fsspec",
                "packaging",
                "pytorch-lightning",
            ),
            _cka_pytorch,
        ),
        Library("torch-cka 0.21", "torch_cka", ("torch-cka==0.21",), _torch_cka),
    )
}
