"""`CKA`: compares the layers of two networks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from cka.capture import Layers, select, selects
from cka.capture.axes import check_axes
from cka.capture.outputs import OutputReader, Pick, Pooling
from cka.data import Counting, batch_count, batch_tuples, check_loader, sample_count, shuffles
from cka.errors import CKAError, CKAWarning, SettingError
from cka.functional import HSICEstimator
from cka.functional.kernels import (
    RBF,
    Kernel,
    check_linear,
    kernel_name,
    linear_gram,
    resolve_kernel,
)
from cka.functional.neighbours import Measure, check_estimator_of, resolve_measure
from cka.functional.resampling import Resampling
from cka.result import CKAResult
from cka.running import Estimator, EstimatorName, Minibatch, SmallerParts, check_settings, placement
from cka.running.exact import Exact, ExactNeighbours
from cka.running.model_runner import (
    ComparedModel,
    Feed,
    InputSettings,
    ModelRunner,
    check_cast,
    check_model,
    model_names,
)
from cka.running.placement import (
    Lockstep,
    device_for,
    eager,
    evaluation_mode,
    layer_by_layer,
    moved_to,
    unwrap,
)
from cka.running.rows import Progress
from cka.running.run import Outcome, Provenance, Resamples, Run, SimultaneousRuns
from cka.samples import Mask, SampleRule, Samples, check_masks


class CKA:
    """Compares the layers of two networks, or of one network with itself.

    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> model1, model2 = (
    ...     torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()) for _ in range(2)
    ... )
    >>> batches = torch.randn(4, 32, 8)
    >>> with CKA(model1, model2, device="cpu") as cka:
    ...     result = cka.compare(batches)
    >>> result.matrix.shape
    torch.Size([2, 2])

    Models run in evaluation mode and without gradients. Hooks are registered only during a forward
    pass. Every ``compare`` restores the models' modes and devices, also if it raises. At the end
    of the ``with`` block the references to the models are dropped; without a ``with`` block the
    object keeps them.
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
        estimator: EstimatorName | None = None,
        measure: str | Measure = "cka",
        kernel: str | Kernel = "linear",
        hsic_batch_size: int | None = None,
        pooling: Pooling | None = None,
        mask: Mask | tuple[Mask, Mask] = "auto",
        pick: Pick | None = None,
        feed: Feed | None = None,
        samples: Samples = None,
        axes: Mapping[str, str] | None = None,
        cast_inputs: bool | str | Sequence[str] = False,
        distributed: bool = True,
        memory_limit_bytes: int | None = None,
    ) -> None:
        """Check the settings and select the layers. No model is run or changed.

        Args:
            model1: the model whose layers become the rows of the result. If it is wrapped in
                DataParallel, DistributedDataParallel or torch.compile, the network inside is run,
                eagerly and on one device.
            model2: the model whose layers become the columns. None, or model1 again, compares
                model1 with itself and runs it once.
            model1_layers: names, indices, globs, module types or predicates, or a sequence of
                these; None for every layer. In a glob, ``*`` matches within one level of names
                and ``**`` any number of levels. A module that is called twice gives two rows.
            model2_layers: the same for model2. None means model1_layers, and every layer of model2
                if these are not in it.
            model1_name: name of model1 in the result; by default its class.
            model2_name: name of model2 in the result; by default its class.
            device: the device on which both models run. None means each model's own device if it
                is an accelerator, otherwise the current accelerator, or the CPU if none is
                available. ``compare`` moves a model there and back if necessary; one that is
                sharded over ranks stays where its shards are.
            measure: "cka" (default), or similarity by nearest neighbours (Huh et al. 2024):
                "mutual_knn" or "cknna", or ``cka.MutualKNN(k=20)`` or ``cka.CKNNA(k=20)`` for other
                numbers of neighbours than 10. They need the features of all samples.
            estimator: None is "unbiased" for CKA, and "exact" for measures by neighbours, which
                have no unbiased estimate from minibatches. "unbiased" (HSIC summed over
                minibatches, Nguyen et al. 2020), "biased" (the same with the biased HSIC of
                Gretton et al. 2005), "exact" (one unbiased estimate
                over all samples, for which all features are stored in host memory), or
                "sampled_neurons" (unbiased, and corrected for a finite number of features, Chun
                et al. 2025; see :func:`cka.cka_from_features`; for the linear kernel).
            kernel: "linear", "rbf", RBF(threshold=0.5), or a function from (n, p) features to
                their (n, n) Gram matrix.
            hsic_batch_size: each batch is split for HSIC into parts of this many samples, at
                least 4. The estimate remains unbiased and large batches cost less, but the
                standard error is larger.
            pooling: how outputs with tokens or other positions, such as (n, t, d) or (n, c, h, w),
                become features: "flatten" (default) keeps all positions, "mean" averages them,
                "cls" keeps the first token and "last" the last one. "tokens" takes each token that
                the mask keeps for a sample, m in a batch, whose Gram matrices have m² entries
                (``hsic_batch_size=256`` limits that); both models must have the same tokens.
            mask: which tokens of a batch are padding. Padding is left out of outputs that have one
                position for each token of the masked input: "mean" averages the other tokens,
                "cls" and "last" take the first and the last of them, and "flatten" replaces padding
                by the mean of the batch's tokens at the same position, which adds nothing to the
                product of two samples. "auto" (default) uses the entries or attributes of the batch
                that are named ``attention_mask`` or ``src_key_padding_mask``, and for the tokens of
                a decoder ``decoder_attention_mask`` or ``tgt_key_padding_mask``; in masks whose
                name ends with ``key_padding_mask``, True is padding. Otherwise a name in the batch,
                or a function of the batch that returns a mask (n, t) with 1 for tokens and 0 for
                padding; a mapping of the model's inputs to these, if several have masks; None for
                no mask. A pair is one mask for each model.
            pick: a function ``pick(layer_name, output)`` that returns the tensor to compare, or
                None to leave the layer out. By default it is the first tensor of the output.
            feed: a function ``feed(model, batch)`` that runs the model on a whole batch, which is
                already on the model's device. By default, a mapping is passed as keyword
                arguments; of a tuple, list or dataclass, the first element is passed. Before the
                first batch it is called once or twice on two of its samples, see ``axes``.
            samples: what the samples of a batch are, if they are not in axis 0 of all its tensors:
                an axis, the name of an entry with the samples in axis 0 (or several names), or a
                function of the batch that returns their number.
            axes: which axes of layers' outputs have samples, tokens and features, by the name or
                glob of layers: ``{"encoder.**": "tnd"}``. n is the samples, t (or h, w) tokens or
                other positions, d (or c) features, ``...`` any further features. By default the
                model is run on two samples of the first batch, and, for masks and pooling, on
                fewer tokens, to see which axes change. Only shapes are kept of these runs. No
                such run is needed if the axes of all layers are stated.
            cast_inputs: True converts floating-point inputs to the dtype of the weights, a name or
                names only those entries of the batch. By default no input is changed.
            distributed: if torch.distributed is initialised, add the sums of all ranks; every rank
                must then call ``compare``. False uses this process only.
            memory_limit_bytes: limit in bytes of host memory for the "exact" estimator; None
                means the memory that is free.

        Raises:
            InputError: if a model is not a torch.nn.Module, or is scripted or traced.
            LayerError: if a layer selection matches nothing.
            SettingError: if a setting is unknown or out of range.
            RuntimeError: if torch does not know the device.
        """
        self._measure = resolve_measure(measure)
        self._estimator = check_estimator_of(self._measure, estimator)
        check_settings(self._estimator, hsic_batch_size)
        if self._measure is not None and kernel != "linear":
            raise SettingError(
                f"measure={self._measure.name!r} does not use a kernel, got kernel={kernel!r}; "
                "omit kernel="
            )
        check_model(model1, "model1")
        first = unwrap(model1)
        if model2 is not None:
            check_model(model2, "model2")
        second = first if model2 is None else unwrap(model2)
        if model2_layers is None:
            model2_layers = model1_layers
            if second is not first and not selects(second, model1_layers):
                warnings.warn(
                    f"model1_layers={model1_layers!r} matches no layer of model2, so all layers "
                    "of model2 are compared; pass model2_layers= to select some",
                    CKAWarning,
                    stacklevel=2,
                )
                model2_layers = None
        names = model_names(first, second, model1_name, model2_name)
        self._models: Sequence[ComparedModel] | None = (
            ComparedModel(first, select(first, model1_layers), names[0]),
            ComparedModel(second, select(second, model2_layers), names[1]),
        )
        self._device = None if device is None else torch.device(device)
        self._kernel = resolve_kernel(kernel)
        if self._estimator == "sampled_neurons":
            check_linear(self._kernel)
        self._kernel_name = kernel_name(kernel)
        self._part_size = hsic_batch_size
        self._reader = OutputReader(pooling or "flatten", pick)
        self._inputs = InputSettings(
            feed, SampleRule(samples), check_cast(cast_inputs), check_axes(axes)
        )
        self._masks = check_masks(mask)
        self._one_mask = self._masks[0] == self._masks[1]
        self._over_ranks = distributed
        self._limit_bytes = memory_limit_bytes

    def compare(
        self,
        dataloader: Iterable[Any],
        dataloader2: Iterable[Any] | None = None,
        *,
        progress: bool = True,
        null: int | None = None,
        bootstrap: int | None = None,
        generator: torch.Generator | None = None,
    ) -> CKAResult:
        """Run the data through the models and compare every pair of layers.

        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
        >>> result = CKA(model, device="cpu").compare(torch.randn(4, 32, 8), progress=False)
        >>> result.model1_layers, result.batches
        (['0', '1'], 4)

        Args:
            dataloader: yields batches for both models: tensors, ``(inputs, ...)``, dicts or
                dataclasses, with the samples in the first dimension.
            dataloader2: yields batches for model2, with the same samples in the same order. None,
                or dataloader again, gives both models the same batches.
            progress: show a progress bar.
            null: number of random permutations of the samples, e.g. 200, by which every pair is
                calibrated: ``result.calibration`` has mean and spread by chance, z and p-values.
                None for no calibration. The models run once all the same. Samples are permuted
                within each batch, so they must be exchangeable there. The sums take 8 null bytes
                for each pair of distinct outputs, and in a self-comparison for one order of it.
            bootstrap: number of resamples of the samples, e.g. 200, by which ``result.confidence``
                gets a standard error and an interval for every pair; see :class:`cka.Confidence`
                for what they estimate. None for none. Samples are drawn within each batch. Time and
                memory are those of ``null``.
            generator: a torch.Generator on the CPU, from which the seed of permutations and
                resamples is drawn; None means seed 0. On several ranks it must have the same state
                on all.

        Returns:
            The result, on the CPU. A CKAWarning names what was left out (batches that are too
            small, layers that never ran or whose output cannot be compared), to which layers the
            mask does not apply, and what is NaN. After the third batch, another one says if
            ``hsic_batch_size`` would at least halve the time on a CPU.

        Raises:
            CKAError: if the ``with`` block has ended.
            InputError: if the two data loaders differ in their batches, if no batch was large
                enough, if a mask cannot be used, or if ranks ran different layers.
            LayerError: if no layer is left to compare.
            SettingError: if the exact estimator is used on several ranks, if ``null`` or
                ``bootstrap`` is too small, or is used for what it does not fit: both for
                pooling="tokens", ``bootstrap`` for "sampled_neurons".
            DoesNotFitError: if the exact estimator would need too much memory.
        """
        if self._models is None:
            raise CKAError(
                "compare() was called after the with block of this CKA ended; "
                "call it inside the block, or create a new CKA"
            )
        check_loader(dataloader, "dataloader")
        loaders: tuple[Iterable[Any], ...] = (dataloader,)
        if dataloader2 is not None and dataloader2 is not dataloader:
            check_loader(dataloader2, "dataloader2")
            loaders = (dataloader, dataloader2)
        if len(loaders) == 2 and all(map(shuffles, loaders)):
            warnings.warn(
                "both data loaders shuffle, each in its own order, so the models get different "
                "samples; pass one loader for both models, or two loaders with shuffle=False",
                CKAWarning,
                stacklevel=2,
            )
        self._reader.check_resamples(null, bootstrap)
        resamples = Resamples.checked(null, bootstrap, generator, self._estimator, self._measure)
        ((result, messages),) = self._run(self._models, [(0, 1)], loaders, progress, resamples)
        for message in messages:
            warnings.warn(message, CKAWarning, stacklevel=2)
        return result

    def _provenance(self, first: ComparedModel, second: ComparedModel, loaders: int) -> Provenance:
        return Provenance(
            first.name,
            second.name,
            self_comparison=first.module is second.module and loaders == 1 and self._one_mask,
            estimator=self._estimator,
            kernel=self._kernel_name,
            measure="cka" if self._measure is None else self._measure.name,
        )

    def _run(
        self,
        models: Sequence[ComparedModel],
        pairs: Sequence[tuple[int, int]],
        loaders: tuple[Iterable[Any], ...],
        progress: bool,
        resamples: Resamples,
        stacklevel: int = 3,
    ) -> list[Outcome]:
        """Run every model on every batch; ``stacklevel`` is that of a warning for the caller."""
        advice = self._advice()
        rank = placement.rank() if self._over_ranks else 0
        resamplings = [resamples.of_pair(rank) for _ in pairs]
        estimators = [
            self._make_estimator(loaders[0], resampling.requested(), advice)
            for resampling in resamplings
        ]
        modules = list(dict.fromkeys(model.module for model in models))
        with ExitStack() as stack:
            # Not inference_mode: its tensors have no version counter, so an output changed in place
            # could not be distinguished from one that is returned unchanged.
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager(modules))
            stack.enter_context(layer_by_layer())
            stack.enter_context(evaluation_mode(modules))
            lockstep = Lockstep(modules)
            runners = self._make_runners(models, len(loaders), estimators[0], lockstep, stack)
            runs = [
                Run(
                    runners if len(runners) == 1 else [runners[first], runners[second]],
                    (models[first].selection, models[second].selection),
                    estimator,
                    self._provenance(models[first], models[second], len(loaders)),
                    over_ranks=self._over_ranks,
                    resamplings=resampled,
                    counting=self._counting,
                )
                for (first, second), estimator, resampled in zip(
                    pairs, estimators, resamplings, strict=True
                )
            ]
            several = SimultaneousRuns(runners, pairs, runs, lockstep)
            stack.callback(several.close)
            bar = stack.enter_context(Progress(batch_count(loaders[0]), shown=progress))
            # A batch of few samples may have enough tokens.
            least = 1 if self._counting is None else estimators[0].min_samples
            for batches in lockstep.batches(batch_tuples(loaders, least, self._inputs.counting)):
                several.add(batches)
                message = None if advice is None else advice.batch_done(runs[0].last_samples)
                if message is not None:
                    warnings.warn(message, CKAWarning, stacklevel=stacklevel)
                bar.batch_done(runs[0].samples)
                del batches  # otherwise they stay alive while the next ones are fetched
            # The caller may be in inference mode, but the result must be an ordinary tensor.
            with torch.inference_mode(False), torch.no_grad():
                return [run.outcome() for run in runs]

    @property
    def _counting(self) -> Counting | None:
        """How the samples of a batch are counted; None if only the masks show them."""
        return None if self._reader.tokens_are_samples else self._inputs.counting

    def _make_runners(
        self,
        models: Sequence[ComparedModel],
        loaders: int,
        estimator: Estimator,
        lockstep: Lockstep,
        stack: ExitStack,
    ) -> list[ModelRunner]:
        """Return one runner for a self-comparison on the same data, otherwise one per model."""
        # One model on the same data runs once, also if its rows and columns are different layers.
        groups = [[model] for model in models]
        if loaders == 1 and len({model.module for model in models}) == 1 and self._one_mask:
            groups = [list(models)]
        runners = []
        for number, group in enumerate(groups, start=1):
            name = f"model{number}"
            module = group[0].module
            device = device_for(module, self._device, name)
            stack.enter_context(moved_to(module, device))
            selections = [model.selection for model in group]
            mask = self._masks[min(number, 2) - 1]  # compare_many has one mask for all its models
            runners.append(
                ModelRunner(
                    module, name, selections, self._reader, estimator, device, self._inputs, mask,
                    lockstep,
                )
            )  # fmt: skip
        return runners

    def _make_estimator(
        self,
        loader: Iterable[Any],
        resamplings: Sequence[Resampling],
        advice: SmallerParts | None,
    ) -> Estimator:
        if self._estimator == "exact":
            if self._over_ranks and placement.is_active():
                raise SettingError(
                    "the exact estimator needs all samples in one process, but torch.distributed "
                    "has several ranks; run it on one rank with distributed=False, or use "
                    "estimator='unbiased'"
                )
            expected = sample_count(loader) if self._counting is not None else None
            if self._measure is not None:
                return ExactNeighbours(self._measure, expected, self._limit_bytes, resamplings)
            return Exact(self._kernel, expected, self._limit_bytes, resamplings)
        if self._estimator == "sampled_neurons":
            return Minibatch(
                self._kernel,
                "unbiased",
                self._part_size,
                resamplings,
                sampled_neurons=True,
                advice=advice,
            )
        kind: HSICEstimator = "biased" if self._estimator == "biased" else "unbiased"
        return Minibatch(self._kernel, kind, self._part_size, resamplings, advice=advice)

    def _advice(self) -> SmallerParts | None:
        """Return what may propose parts; None if they are set, or the kernel's cost is unknown."""
        known = self._kernel is linear_gram or isinstance(self._kernel, RBF)
        return SmallerParts() if known and self._part_size is None else None

    def __enter__(self) -> CKA:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The variable of a with statement still exists after the block. It must not keep the
        # models' weights alive.
        self._models = None
