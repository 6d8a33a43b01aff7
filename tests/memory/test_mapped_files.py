"""Mapped files count once with the size of the file; with the ledger, each tensor in them."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_cka_memory import MemoryProbe
from pytest_cka_memory.meters import Meter
from pytest_cka_memory.meters.storage_meter import StorageMeter


@pytest.fixture(scope="module")
def both_meters(native_meter: Meter) -> Meter:
    """The native meter alone: for the ledger, figures of mapped files are lower bounds."""
    return native_meter


def checkpoint(folder: Path) -> tuple[Path, Callable[[], Any]]:
    file = folder / "weights.pt"
    torch.save({"a": torch.zeros(1000), "b": torch.zeros(2000)}, file)
    return file, lambda: torch.load(file, mmap=True)


def safe_tensors(folder: Path) -> tuple[Path, Callable[[], Any]]:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    file = folder / "weights.safetensors"
    safetensors.save_file({"a": torch.zeros(1000), "b": torch.zeros(2000)}, file)
    return file, lambda: safetensors.load_file(file)


def parts_of_a_storage(folder: Path) -> tuple[Path, Callable[[], Any]]:
    file = folder / "data"
    file.write_bytes(bytes(4096))

    def parts() -> list[torch.Tensor]:
        mapped = torch.UntypedStorage.from_file(str(file), False, 4096)
        return [torch.asarray(mapped[first:2048], dtype=torch.uint8) for first in (0, 64)]

    return file, parts


@pytest.mark.parametrize("write", [checkpoint, safe_tensors, parts_of_a_storage])
def test_a_mapped_file_counts_once_and_what_holds_a_part_is_named(
    write: Callable[[Path], tuple[Path, Callable[[], Any]]], cpu: MemoryProbe, tmp_path: Path
) -> None:
    """A mapped file counts once, however many tensors it has, and names one of them."""
    file, load = write(tmp_path)
    with cpu.measure() as region:
        weights = load()
    size = file.stat().st_size
    assert region.retained_bytes == size
    (holding,) = region.retained
    assert str(holding.held_by).startswith("weights[")
    assert "test_mapped_files.py" in holding.made_at
    del weights
    gc.collect()
    assert cpu.snapshot().allocated_bytes == region.start_bytes


def test_a_copy_of_a_mapped_tensor_counts_beside_the_file(cpu: MemoryProbe, tmp_path: Path) -> None:
    """A copy of a tensor of a mapped file counts with its own bytes, beside those of the file."""
    file, load = checkpoint(tmp_path)
    with cpu.measure() as region:
        weights = load()
        copy = weights["a"].clone()
    assert region.retained_bytes == file.stat().st_size + copy.nbytes


def test_memory_at_the_address_of_a_file_that_was_unmapped_counts(
    cpu: MemoryProbe, tmp_path: Path
) -> None:
    """After a file is unmapped, tensors count again wherever their memory is."""
    _, load = checkpoint(tmp_path)
    with cpu.measure() as region:
        weights = load()
        del weights
        later = torch.zeros(5000)
    assert region.retained_bytes == later.nbytes


@pytest.mark.parametrize("write", [checkpoint, safe_tensors])
def test_the_ledger_counts_no_byte_of_a_mapped_file_twice(
    write: Callable[[Path], tuple[Path, Callable[[], Any]]], tmp_path: Path
) -> None:
    """With the ledger a mapped file counts as its tensors, which is a lower bound."""
    _, load = write(tmp_path)
    probe = MemoryProbe(meter=StorageMeter())
    with probe.measure() as region:
        weights = load()
        inner = probe.run(lambda loaded: [float(part.sum()) for part in loaded.values()], weights)
    assert region.retained_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert (inner.retained_bytes, inner.net_bytes) == (0, 0)
    del weights
    assert probe.run(int).net_bytes == 0
    assert any(note.startswith("figures are lower bounds ") for note in probe.meter.notes)
