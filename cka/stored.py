"""Features on disk, for models that do not fit together: save them one model at a time, compare.

A folder has one file of numbers for each batch, and one of JSON that says which layer is where in
it. The second is written last, under its final name in one step, so a batch is either stored whole
or not at all, and an interrupted run goes on with the first batch that is missing.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from cka.capture import Layers
from cka.comparison import CKA
from cka.data import batch_tuples, check_loader
from cka.errors import CKAWarning, InputError, SettingError
from cka.functional.features import flattened
from cka.functional.kernels import linear_gram
from cka.running import (
    Estimator,
    Measurement,
)
from cka.running.placement import Lockstep, eager, evaluation_mode, layer_by_layer
from cka.running.rows import Progress, Rows, named_warnings

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

        Returns:
            The features; no tensor is read yet.

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
                "with this folder again to continue where it was interrupted"
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

        Returns:
            Label of a layer -> its features, mapped from the file.
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

    def padded(self, number: int) -> list[str]:
        """Return the layers for which a batch stores padding tokens; they have the batch's mean.

        Args:
            number: of the batch, from 0.

        Returns:
            Their labels, in the order of the layers.
        """
        index = _index(self.folder, number)
        outputs = set(index.get("padded", ()))
        return [label for label in self.layers if index["rows"][label] in outputs]

    def __getitem__(self, layer: str) -> Tensor:
        """Return the features (N, p) of all samples in one layer, as float32 in memory.

        Raises:
            InputError: if there is no such layer, or its number of features varies.
        """
        if layer not in self.layers:
            raise InputError(
                f"{self.folder} has no layer {layer!r}; its first layers are {self.layers[:6]}"
            )
        parts = [self.batch(number)[layer] for number in range(len(self.batch_sizes))]
        widths = sorted({part.shape[1] for part in parts})
        if len(widths) > 1:
            raise InputError(
                f"{layer!r} has {' and '.join(map(str, widths))} features in different batches; "
                'save the features again with pooling="mean"'
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
        self.padded: list[int] = []

    def open(self, file: BinaryIO) -> None:
        self._file, self._entries, self.outputs, self.padded = file, 0, [], []

    def measure(self, features: Tensor, real: Tensor | None = None) -> Measurement:
        assert self._file is not None
        rows = flattened(features, linear_gram)
        for part in rows.split(max(1, 2**20 // max(1, rows.shape[1]))):  # a few MB at a time
            stored = part.to("cpu", self._dtype).contiguous()
            self._file.write(stored.view(torch.uint8).numpy().tobytes())
        if real is not None:
            self.padded.append(len(self.outputs))
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
            (runner,) = self._make_runners([model], 1, estimator, Lockstep([]), stack)
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
                        "padded": writer.padded,
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
    if settings.get("pooling") == "tokens":
        raise SettingError(
            "save_features stores one row for each sample, so it does not support "
            "pooling='tokens'; compare the models in one pass with CKA or compare_many, or write "
            "pooling='mean'"
        )
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
