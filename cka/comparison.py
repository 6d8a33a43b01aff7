"""`CKA`: how alike the layers of two networks are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from cka.capture.layers import Layers, Selection, select
from cka.capture.outputs import Pick, Pooling, Reader
from cka.data.loaders import batches, dataset_size, length
from cka.errors import CKAError, CKAWarning, InputError, SettingError
from cka.functional.kernels import Kernel, resolve_kernel
from cka.progress import Progress
from cka.result import CKAResult
from cka.running import distributed
from cka.running.estimators import Estimator, Exact, Minibatch
from cka.running.placement import device_for, eager, evaluating, placed, unwrap
from cka.running.run import Feed, Outcome, Run, Watcher

EstimatorName: TypeAlias = Literal["unbiased", "biased", "exact"]


@dataclass(frozen=True)
class _Side:
    """One model of a comparison."""

    model: nn.Module
    selection: Selection
    name: str


class CKA:
    """Compares the layers of two networks, or of one with itself.

        with CKA(model1, model2) as cka:
            result = cka.compare(loader)

    Models run in evaluation mode and without gradients. Hooks are on a model only while one of
    its forward passes runs; modes and devices are put back at the end of every ``compare``,
    however it ends. Leaving the ``with`` block lets go of the models as well; without a block
    the object simply holds them.
    """

    def __init__(
        self,
        model1: nn.Module,
        model2: nn.Module | None = None,
        model1_layers: Layers = None,
        model2_layers: Layers = None,
        *,
        model1_name: str | None = None,
        model2_name: str | None = None,
        device: torch.device | str | int | None = None,
        estimator: EstimatorName = "unbiased",
        kernel: str | Kernel = "linear",
        hsic_batch_size: int | None = None,
        pooling: Pooling | None = None,
        pick: Pick | None = None,
        feed: Feed | None = None,
        distributed: bool = True,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Set up a comparison; nothing is run or hooked yet.

        Args:
            model1: its layers become the rows of the result. DataParallel,
                DistributedDataParallel and torch.compile wrappers are looked through: the network
                inside is run, eagerly, on one device.
            model2: its layers become the columns. None, or model1 again, compares model1 with
                itself and runs it once.
            model1_layers: names, indices, globs, module types or predicates, or a sequence of
                these; None for every layer. A module called twice gives two rows.
            model2_layers: likewise for model2; in a self-comparison None means model1_layers.
            model1_name: how the result calls model1; its class by default.
            model2_name: likewise.
            device: where the models run. None: where each one is, if that is an accelerator, else
                on the current accelerator, or the CPU where there is none. A model that is
                elsewhere is moved for the time of each compare and then moved back.
            estimator: "unbiased" (HSIC of minibatches, Nguyen et al. 2020), "biased", or "exact"
                (one unbiased estimate over the Gram matrices of all samples, which needs memory
                for all features and refuses if there is too little).
            kernel: "linear", "rbf", RBF(threshold=0.5), or a function (n, p) -> (n, n).
            hsic_batch_size: split each batch into parts of this size for HSIC. Still unbiased,
                and cheaper at large batches; the price is a larger standard error.
            pooling: what becomes of (n, t, d) outputs: "flatten" (default), "mean" over tokens,
                or "cls" for the first token.
            pick: ``pick(layer_name, output)`` gives the tensor of an output, or None to leave it
                out; by default the first tensor in it.
            feed: ``feed(model, batch)`` runs the model on a whole batch, already on its device; by
                default mappings become keyword arguments, and of tuples, lists and dataclasses
                the first element is the input, in the floating-point dtype of the weights.
            distributed: add up the sums of all ranks where torch.distributed is initialised; every
                rank must then call compare. False: this process only.
            memory_limit_bytes: the most the "exact" estimator may use; None for what is free.

        Raises:
            InputError: if a model is no module.
            LayerError: if a layer selection names nothing.
            SettingError: for a setting that does not exist.
        """
        _check(estimator, hsic_batch_size)
        _check_model(model1, "model1")
        first = unwrap(model1)
        if model2 is not None:
            _check_model(model2, "model2")
        second = first if model2 is None else unwrap(model2)
        if second is first and model2_layers is None:
            model2_layers = model1_layers
        names = _names(first, second, model1_name, model2_name)
        self._sides: tuple[_Side, _Side] | None = (
            _Side(first, select(first, model1_layers), names[0]),
            _Side(second, select(second, model2_layers), names[1]),
        )
        self._device = None if device is None else torch.device(device)
        self._estimator = estimator
        self._kernel = resolve_kernel(kernel)
        self._kernel_name = kernel if isinstance(kernel, str) else _kernel_name(kernel)
        self._part_size = hsic_batch_size
        self._reader = Reader(pooling or "flatten", pick)
        self._feed = feed
        self._ranks = distributed
        self._limit_bytes = memory_limit_bytes

    def compare(
        self,
        dataloader: Iterable[Any],
        dataloader2: Iterable[Any] | None = None,
        *,
        progress: bool = True,
    ) -> CKAResult:
        """Run the data through the models and compare every pair of layers.

        Args:
            dataloader: batches for both models: tensors, ``(inputs, ...)``, dicts, dataclasses.
            dataloader2: batches for model2, the same samples in the same order; None, or
                dataloader again, gives both models the same batches.
            progress: show a bar.

        Returns:
            The result, on the CPU. What was left out (batches too small, layers that never ran or
            whose output has no batch dimension) and what is NaN is named in a CKAWarning.

        Raises:
            CKAError: if the ``with`` block has ended.
            InputError: if the loaders disagree, or no batch was large enough.
            LayerError: if no layer is left to compare.
            DoesNotFitError: if the exact estimator would need too much memory.
        """
        if self._sides is None:
            raise CKAError("this CKA has ended with its with block; make a new one")
        loaders = (dataloader,)
        if dataloader2 is not None and dataloader2 is not dataloader:
            loaders = (dataloader, dataloader2)  # type: ignore[assignment]
        outcome = self._outcome(self._sides, loaders, progress)
        for remark in outcome.remarks:
            warnings.warn(remark, CKAWarning, stacklevel=2)
        first, second = self._sides
        return CKAResult(
            matrix=outcome.matrix,
            standard_error=outcome.standard_error,
            model1_layers=outcome.rows,
            model2_layers=outcome.columns,
            model1_name=first.name,
            model2_name=second.name,
            samples=outcome.samples,
            batches=outcome.batches,
            estimator=self._estimator,
            kernel=self._kernel_name,
            self_comparison=first.model is second.model and len(loaders) == 1,
        )

    def _outcome(
        self, sides: tuple[_Side, _Side], loaders: tuple[Iterable[Any], ...], progress: bool
    ) -> Outcome:
        estimator = self._make_estimator(loaders[0])
        models = list(dict.fromkeys(side.model for side in sides))
        with ExitStack() as stack:
            # Not inference_mode: its tensors count no versions, so that an output handed on
            # unchanged could not be told from one overwritten in place.
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager(models))
            stack.enter_context(evaluating(models))
            watchers = self._watch(sides, len(loaders), estimator, stack)
            run = Run(
                watchers, (sides[0].selection, sides[1].selection), estimator, ranks=self._ranks
            )
            stack.callback(run.close)
            bar = stack.enter_context(Progress(length(loaders[0]), shown=progress))
            for pair in batches(loaders, estimator.fewest):
                run.step(pair)
                bar.batch_done(run.samples)
                del pair  # or it would stay alive while the next one is fetched
            # The caller may be in inference mode; the result shall be an ordinary tensor.
            with torch.inference_mode(False), torch.no_grad():
                return run.outcome()

    def _watch(
        self,
        sides: tuple[_Side, _Side],
        loaders: int,
        estimator: Estimator,
        stack: ExitStack,
    ) -> list[Watcher]:
        """One watcher for a self-comparison on the same data, else one per side."""
        first, second = sides
        groups = [[first], [second]]
        if first.model is second.model and loaders == 1:
            groups = [[first, second]]
        watchers = []
        for group, name in zip(groups, ("model1", "model2"), strict=False):
            model = group[0].model
            device = device_for(model, self._device, name)
            stack.enter_context(placed(model, device))
            selections = [side.selection for side in group]
            watchers.append(Watcher(model, selections, self._reader, estimator, device, self._feed))
        return watchers

    def _make_estimator(self, loader: Iterable[Any]) -> Estimator:
        if self._estimator == "exact":
            if self._ranks and distributed.active():
                raise SettingError(
                    "the exact estimator needs all samples in one process; run it on one rank "
                    "with distributed=False, or use estimator='unbiased'"
                )
            return Exact(self._kernel, dataset_size(loader), self._limit_bytes)
        return Minibatch(self._kernel, self._estimator, self._part_size)

    def __enter__(self) -> CKA:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Hooks, modes and devices are long restored; the name a with block binds outlives it, and
        # must not keep the models' weights alive.
        self._sides = None


def _check(estimator: str, hsic_batch_size: int | None) -> None:
    if estimator not in get_args(EstimatorName):
        raise SettingError(
            f"cannot use {estimator!r} as an estimator; write 'unbiased', 'biased' or 'exact'"
        )
    if hsic_batch_size is None:
        return
    if estimator == "exact":
        raise SettingError("the exact estimator takes all samples at once; drop hsic_batch_size")
    if hsic_batch_size < 4:
        raise SettingError(f"hsic_batch_size must be at least 4, got {hsic_batch_size}")


def _check_model(model: object, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} must be a torch.nn.Module, got {type(model).__name__}")


def _names(
    first: nn.Module, second: nn.Module, given1: str | None, given2: str | None
) -> tuple[str, str]:
    """Names for both models, told apart where only their class is known."""
    one, two = type(first).__name__, type(second).__name__
    if first is second:
        return given1 or given2 or one, given2 or given1 or one
    if one == two and given1 is None and given2 is None:
        return f"{one} 1", f"{two} 2"
    return given1 or one, given2 or two


def _kernel_name(kernel: Kernel) -> str:
    return getattr(kernel, "__name__", None) or repr(kernel)
