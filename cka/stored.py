"""Features on disk, for models that do not fit together: save them one model at a time, compare.

A folder has one file of numbers for each batch, and one of JSON that says which layer is where in
it. The second is written last, under its final name in one step, so a batch is either stored whole
or not at all, and an interrupted run goes on with the first batch that is missing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from cka.capture.hooks import PassRecord
from cka.capture.layers import Call, Layers, Selection
from cka.comparison import CKA
from cka.data import batch_tuples, check_loader
from cka.errors import CKAWarning, InputError, SettingError
from cka.functional.kernels import Kernel, flattened, linear_gram, resolve_kernel
from cka.result import CKAResult
from cka.running.estimators import Estimator, Measurement, Minibatch, check_settings
from cka.running.messages import Progress, named_warnings
from cka.running.model_runner import Rows
from cka.running.placement import eager, evaluation_mode, layer_by_layer
from cka.running.run import Resamples, Run

_SCHEMA = "cka-features/1"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StoredFeatures:
    """The features of one model's layers in a folder, from :func:`cka.save_features`."""

    folder: Path
    """Where they are."""
    name: str
    """Name of the model."""
    dtype: str
    """``"float32"`` or ``"bfloat16"``."""
    layers: list[str]
    """Labels of the layers that every batch has."""
    batch_sizes: list[int]
    """Number of samples in each batch."""

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> StoredFeatures:
        """Read what a folder has.

        Args:
            folder: a folder that :func:`cka.save_features` wrote.

        Raises:
            InputError: if it has no stored features, or a run was interrupted.
        """
        path = Path(folder)
        try:
            about = json.loads((path / "features.json").read_text(encoding="utf-8"))
            if about["schema"] != _SCHEMA or not about["complete"]:
                raise KeyError("complete")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} has no complete features in the format {_SCHEMA!r}; run save_features "
                "with this folder, which goes on where it was interrupted"
            ) from error
        indices = [_index(path, number) for number in range(about["batches"])]
        common = [
            label
            for label in indices[0]["rows"]
            if all(label in index["rows"] for index in indices)
        ]
        sizes = [index["samples"] for index in indices]
        return cls(path, about["name"], about["dtype"], common, sizes)

    def batch(self, number: int) -> dict[str, Tensor]:
        """Return the features (n, p) of each layer in a batch, read when they are used.

        Layers that returned the same tensor have the same features.

        Args:
            number: of the batch, from 0.
        """
        index = _index(self.folder, number)
        dtype = _DTYPES[self.dtype]
        file = str(_data_file(self.folder, number))
        size = os.path.getsize(file) // dtype.itemsize
        # Mapped, not read: only the layer that is used is in memory.
        everything = torch.from_file(file, shared=False, size=size, dtype=dtype)
        outputs = [
            everything[start : start + rows * width].view(rows, width)
            for start, rows, width in index["outputs"]
        ]
        return {label: outputs[index["rows"][label]] for label in self.layers}

    def __getitem__(self, layer: str) -> Tensor:
        """Return the features (N, p) of all samples in one layer, as float32 in memory.

        Raises:
            InputError: if there is no such layer, or its number of features varies.
        """
        if layer not in self.layers:
            raise InputError(f"{self.folder} has no layer {layer!r}; it has {self.layers[:6]}")
        parts = [self.batch(number)[layer] for number in range(len(self.batch_sizes))]
        widths = sorted({part.shape[1] for part in parts})
        if len(widths) > 1:
            raise InputError(
                f"{layer!r} has {' and '.join(map(str, widths))} features in different batches; "
                'save with pooling="mean"'
            )
        return torch.cat([part.float() for part in parts])

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(self.batch_sizes)


def _data_file(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06}.bin"


def _index_file(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06}.json"


def _index(folder: Path, number: int) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(_index_file(folder, number).read_text(encoding="utf-8"))
    return index


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(json.dumps(value), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class _Writer:
    """Writes each output to a file inside its hook, so that one output at a time is in memory."""

    min_samples = 1
    uneven: Sequence[set[int]] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._file: BinaryIO | None = None
        self._entries = 0
        self.outputs: list[tuple[int, int, int]] = []

    def open(self, file: BinaryIO) -> None:
        self._file, self._entries, self.outputs = file, 0, []

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        assert self._file is not None
        rows = flattened(features, linear_gram)
        for part in rows.split(max(1, 2**20 // max(1, rows.shape[1]))):  # a few MB at a time
            stored = part.to("cpu", self._dtype).contiguous()
            self._file.write(stored.view(torch.uint8).numpy().tobytes())
        self.outputs.append((self._entries, rows.shape[0], rows.shape[1]))
        self._entries += rows.numel()
        return Measurement(())

    def add(self, models: Any) -> None:
        raise NotImplementedError

    def sums(self) -> None:
        return None

    def clear(self) -> None:
        self._file = None


class _Saving(CKA):
    """Runs one model, and writes its features to a folder."""

    def save(self, loader: Iterable[Any], folder: Path, dtype: str, *, progress: bool) -> None:
        assert self._models is not None
        writer = _Writer(_DTYPES[dtype])
        model = self._models[0]
        rows = Rows()
        count = 0
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eager([model.module]))
            stack.enter_context(layer_by_layer())
            stack.enter_context(evaluation_mode([model.module]))
            estimator: Estimator = writer
            (runner,) = self._make_runners([model], 1, estimator, stack)
            stack.callback(writer.clear)
            bar = stack.enter_context(Progress(None, shown=progress))
            for (batch,) in batch_tuples((loader,), 1, self._inputs.counting):
                if not _index_file(folder, count).exists():
                    with _data_file(folder, count).open("wb") as file:
                        writer.open(file)
                        record = runner.run(batch)
                    rows.positions(record)
                    index = {
                        "samples": record.samples,
                        "rows": {call.label: at for call, at in record.rows.items()},
                        "outputs": writer.outputs,
                    }
                    _write_json(_index_file(folder, count), index)
                count += 1
                bar.batch_done(count)
        about = {"schema": _SCHEMA, "name": model.name, "dtype": dtype, "batches": count}
        _write_json(folder / "features.json", {**about, "complete": count > 0})
        reasons = {why: rows.labels_left_out(why) for why in rows.left_out.values()}
        for message in named_warnings([(why.value, labels) for why, labels in reasons.items()]):
            warnings.warn(message, CKAWarning, stacklevel=4)


def save_features(
    model: nn.Module | Callable[[], nn.Module],
    dataloader: Iterable[Any],
    folder: str | os.PathLike[str],
    *,
    layers: Layers = None,
    name: str | None = None,
    dtype: str = "float32",
    progress: bool = True,
    **settings: Any,
) -> StoredFeatures:
    """Run one model and write the features of its layers to a folder, one output at a time.

    Models that do not fit in memory together are compared with :func:`cka.compare_features` of
    their folders. A run that was interrupted goes on with the first batch that is not stored, if
    the loader yields the same batches in the same order. Host memory is that of the forward pass
    and a few MB; the folder has the bytes of all features.

    Args:
        model: the model, or a function that loads it, which is called only if a batch is missing.
        dataloader: yields batches, as for :meth:`cka.CKA.compare`.
        folder: where the features go; it is created.
        layers: the layers, as ``model1_layers`` of :class:`cka.CKA`.
        name: name of the model; by default its class.
        dtype: "float32", or "bfloat16", which takes half of the space and rounds every feature by
            up to 0.4 %.
        progress: show a progress bar.
        **settings: further settings of :class:`cka.CKA` about the data: ``device``, ``pooling``,
            ``mask``, ``pick``, ``feed``, ``samples``, ``axes``, ``cast_inputs``.

    Returns:
        The stored features.

    Raises:
        InputError: as :meth:`cka.CKA.compare`.
        SettingError: if a setting is unknown.
    """
    if dtype not in _DTYPES:
        raise SettingError(f"cannot use {dtype!r} as dtype; write 'float32' or 'bfloat16'")
    path = Path(folder)
    if (path / "features.json").exists():
        return StoredFeatures.load(path)
    path.mkdir(parents=True, exist_ok=True)
    check_loader(dataloader, "dataloader")
    network = model if isinstance(model, nn.Module) else model()
    saving = _Saving(network, model1_layers=layers, model1_name=name, **settings)
    saving.save(dataloader, path, dtype, progress=progress)
    return StoredFeatures.load(path)


class _RowsOfFile:
    """What a comparison needs of a model whose features are stored."""

    def __init__(self) -> None:
        self.rows = Rows()

    def clear(self) -> None:
        """Nothing is kept."""


def compare_features(
    features1: StoredFeatures | str | os.PathLike[str],
    features2: StoredFeatures | str | os.PathLike[str],
    *,
    kernel: str | Kernel = "linear",
    estimator: str = "unbiased",
    hsic_batch_size: int | None = None,
    zscore: bool = False,
    null: int | None = None,
    bootstrap: int | None = None,
    generator: torch.Generator | None = None,
) -> CKAResult:
    """Compare the layers of two models whose features are in folders.

    The result is that of a ``CKA(model1, model2)`` on the same batches. Memory is that of the Gram
    matrices of one batch of n samples, 4 n² bytes for each layer of both models, and the features
    of one layer in it.

    Args:
        features1: what :func:`cka.save_features` returned, or its folder; its layers are the rows.
        features2: the same of the other model, from the same samples in the same batches.
        kernel: as for :class:`cka.CKA`.
        estimator: "unbiased" or "biased".
        hsic_batch_size: as for :class:`cka.CKA`.
        zscore: divide each feature by its standard deviation over all samples, so that features
            with large values do not decide alone. One more pass over the files.
        null: as for :meth:`cka.CKA.compare`.
        bootstrap: as for :meth:`cka.CKA.compare`.
        generator: as for :meth:`cka.CKA.compare`.

    Returns:
        The result.

    Raises:
        InputError: if the batches differ, or a folder has no complete features.
        SettingError: if a setting is unknown.
    """
    both = [
        each if isinstance(each, StoredFeatures) else StoredFeatures.load(each)
        for each in (features1, features2)
    ]
    if both[0].batch_sizes != both[1].batch_sizes:
        raise InputError(
            f"the stored batches differ: {both[0].batch_sizes[:4]} and {both[1].batch_sizes[:4]} "
            "samples (the first four); save both from the same loader"
        )
    check_settings(estimator, hsic_batch_size)
    if estimator not in ("unbiased", "biased"):
        raise SettingError(f"cannot use {estimator!r} for stored features; write 'unbiased'")
    resamples = Resamples.checked(null, bootstrap, generator, estimator)
    of_pair = resamples.of_pair(0)
    gram = resolve_kernel(kernel)
    minibatch = Minibatch(gram, estimator, hsic_batch_size, of_pair.requested())  # type: ignore[arg-type]
    sides = [_RowsOfFile(), _RowsOfFile()]
    selections = (_selection(both[0].layers), _selection(both[1].layers))
    run = Run(sides, selections, minibatch, over_ranks=False, resamplings=of_pair, counting=None)
    scales = [_scales(each) if zscore else {} for each in both]
    with torch.no_grad():
        for number, size in enumerate(both[0].batch_sizes):
            if size < minibatch.min_samples:
                run.skip(size)
                continue
            run.add(
                [
                    _record(each.batch(number), size, minibatch, scale)
                    for each, scale in zip(both, scales, strict=True)
                ]
            )
        outcome = run.outcome()
    for message in outcome.warnings:
        warnings.warn(message, CKAWarning, stacklevel=2)
    return CKAResult(
        matrix=outcome.matrix,
        standard_error=outcome.standard_error,
        sums=outcome.sums,
        calibration=outcome.calibration,
        confidence=outcome.confidence,
        model1_layers=outcome.rows,
        model2_layers=outcome.columns,
        model1_name=both[0].name,
        model2_name=both[1].name,
        samples=outcome.samples,
        batches=outcome.batches,
        estimator=estimator,
        kernel=kernel if isinstance(kernel, str) else repr(kernel),
        self_comparison=both[0].folder == both[1].folder,
    )


def _selection(labels: Sequence[str]) -> Selection:
    return Selection({}, {(label, 0): position for position, label in enumerate(labels)})


def _record(
    features: Mapping[str, Tensor], samples: int, estimator: Estimator, scales: Mapping[str, Tensor]
) -> PassRecord[Measurement]:
    """Return the measurements of one batch, each of layers with the same features once."""
    record: PassRecord[Measurement] = PassRecord(samples)
    position_of: dict[int, int] = {}
    for label, rows in features.items():
        known = position_of.get(rows.data_ptr())
        if known is None:
            known = position_of[rows.data_ptr()] = len(record.values)
            wide = rows if label not in scales else rows.float() * scales[label]
            record.values.append(estimator.measure(wide))
        record.rows[Call(label, 0)] = known
    return record


def _scales(features: StoredFeatures) -> dict[str, Tensor]:
    """Return the reciprocal standard deviation (p,) of each feature of each layer; 0 if it is 0."""
    sums: dict[str, list[Tensor]] = {}
    starts: dict[str, Tensor] = {}
    for batch in _batches(features):
        for label, rows in batch.items():
            # Differences from the first sample, so that a large offset costs no digits.
            start = starts.setdefault(label, rows[0].double())
            wide = rows.double() - start
            parts = sums.setdefault(label, [torch.zeros_like(start), torch.zeros_like(start)])
            if parts[0].shape != wide[0].shape:
                raise InputError(
                    f"zscore=True needs the same number of features in every batch, but {label!r} "
                    'has different ones; save with pooling="mean"'
                )
            parts[0] += wide.sum(0)
            parts[1] += wide.square().sum(0)
    count = len(features)
    scales = {}
    for label, (first, second) in sums.items():
        variance = second / count - (first / count) ** 2
        known = variance > 1e-14 * (second / count)
        scales[label] = torch.where(known, variance.clamp(min=0).rsqrt(), 0).float()
    return scales


def _batches(features: StoredFeatures) -> Iterator[dict[str, Tensor]]:
    return (features.batch(number) for number in range(len(features.batch_sizes)))
