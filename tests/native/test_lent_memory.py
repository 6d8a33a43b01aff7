"""Memory that torch does not allocate: what other libraries lend, shared memory, mapped files."""

import functools
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from pytest_cka_memory import MemoryProbe


@functools.cache
def old() -> torch.Tensor:
    """Return a tensor that is older than any region that measures its uses."""
    return torch.arange(100, dtype=torch.float32)


def array() -> Any:
    return np.zeros(100, np.float32)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda: torch.from_numpy(array()), 400, id="from_numpy"),
        pytest.param(lambda: torch.frombuffer(bytearray(64), dtype=torch.uint8), 64, id="buffer"),
        pytest.param(lambda: torch.from_dlpack(array()), 400, id="from_dlpack"),
        pytest.param(lambda: torch.utils.dlpack.from_dlpack(array()), 400, id="utils-dlpack"),
        pytest.param(lambda: torch.as_tensor(array()), 400, id="as_tensor"),
        pytest.param(lambda: torch.as_tensor([1.0, 2.0]), 8, id="as_tensor-copies-a-list"),
        pytest.param(lambda: torch.asarray(array()), 400, id="asarray"),
        pytest.param(
            lambda: torch.asarray(array(), copy=True).add_(0), 400, id="asarray-that-copies"
        ),
        pytest.param(
            lambda: torch.UntypedStorage.from_buffer(bytearray(64), "native", dtype=torch.uint8),
            64,
            id="from_buffer",
        ),
        pytest.param(lambda: torch.as_tensor(old()), 0, id="as_tensor-of-a-tensor"),
        pytest.param(lambda: torch.from_dlpack(old()), 0, id="from_dlpack-of-a-tensor"),
        pytest.param(lambda: torch.from_numpy(old().numpy()), 0, id="from_numpy-of-a-tensor"),
        pytest.param(lambda: torch.from_numpy(np.zeros(0, np.float32)), 0, id="empty"),
    ],
)
def test_memory_that_another_library_lends_is_counted(
    probe: MemoryProbe, make: Callable[[], object], size: int
) -> None:
    """Memory that another library lends to torch counts once; torch's own does not count again."""
    old()
    region = probe.run(make)
    assert region.retained_bytes == region.net_bytes == size
    before = region.start_bytes
    region.result = None
    assert probe.snapshot().allocated_bytes == before


def test_memory_that_is_lent_twice_counts_until_both_tensors_are_freed(probe: MemoryProbe) -> None:
    """Memory that is lent to two tensors counts until both are freed, whichever is first."""
    lent = array()
    for freed_first in (0, 1):
        with probe.measure() as region:
            tensors = [torch.from_numpy(lent), torch.from_numpy(lent)]
            del tensors[freed_first]
        assert region.retained_bytes == region.net_bytes == region.peak_increase_bytes == 400
        tensors.clear()
        assert probe.snapshot().allocated_bytes == region.start_bytes


def test_lent_memory_that_is_freed_after_the_region_is_not_live(probe: MemoryProbe) -> None:
    """Lent memory that is freed between regions, when nothing is
    patched, is noticed by the next.
    """
    with probe.measure() as first:
        kept = torch.from_numpy(array())
    assert first.retained_bytes == kept.nbytes
    del kept
    with probe.measure() as second:
        pass
    assert second.start_bytes == first.start_bytes


def test_lent_memory_counts_in_the_peak(probe: MemoryProbe) -> None:
    """If two of three arrays are lent at the same time, the peak contains both."""
    with probe.measure() as region:
        tensor = torch.from_numpy(array())
        tensor = torch.from_numpy(array())
        tensor = torch.from_numpy(array())
    assert (region.peak_increase_bytes, region.retained_bytes) == (800, 400)
    del tensor


def test_functions_are_restored_after_the_last_region(probe: MemoryProbe) -> None:
    """The functions that lend memory are torch's own again once the last open region ends."""
    before = torch.from_numpy
    with probe.measure():
        with probe.measure():
            assert torch.from_numpy is not before
        assert torch.from_numpy is not before
    assert torch.from_numpy is before


@pytest.mark.parametrize("name", ["from_numpy", "as_tensor", "from_dlpack", "frombuffer"])
def test_functions_can_be_pickled_in_a_region(probe: MemoryProbe, name: str) -> None:
    """A function that is patched in a region can be pickled, and the other process has torch's."""
    with probe.measure():
        text = pickle.dumps(getattr(torch, name))
    assert pickle.loads(text) is getattr(torch, name)


EACH_IN_A_FORK = """
import os
import runpy
import sys
import torch

for file in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        runpy.run_path(file, run_name="__main__")
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

SCRIPTING = """
import torch
from pytest_cka_memory import MemoryProbe

def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * torch.as_tensor([2.0])

def add(x: torch.Tensor) -> torch.Tensor:
    return x + torch.as_tensor([2.0])

def subtract(x: torch.Tensor) -> torch.Tensor:
    return x - torch.as_tensor([2.0])

probe = MemoryProbe("cpu")
with probe.measure():
    assert torch.jit.script(doubled)(torch.ones(1)).item() == 2
assert torch.jit.script(add)(torch.ones(1)).item() == 3
with probe.measure(), MemoryProbe("cpu").measure():
    assert torch.jit.script(subtract)(torch.ones(1)).item() == -1
"""


COMPILING = """
import numpy as np
import torch
from pytest_cka_memory import MemoryProbe

def compiled(function):
    assert torch.compile(function, backend="eager", fullgraph=True)(torch.ones(1)).item() == 2

probe = MemoryProbe("cpu")
with probe.measure():
    compiled(lambda x: x * 2)
compiled(lambda x: x + torch.as_tensor([1.0]))
with probe.measure():
    compiled(lambda x: x + torch.asarray([1.0]))
compiled(lambda x: x + torch.from_numpy(np.ones(1, dtype=np.float32)))
"""


@pytest.fixture(scope="module")
def statuses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Exit statuses of programs, in forks of a process that has imported torch but not used it.

    Importing Dynamo, as the server of `forked_processes` does, would already list functions.
    """
    if not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    folder = tmp_path_factory.mktemp("programs")
    programs = {"scripting": SCRIPTING, "compiling": COMPILING}
    files = [folder / f"{name}.py" for name in programs]
    for file, program in zip(files, programs.values(), strict=True):
        file.write_text(program, "utf-8")
    command = [sys.executable, "-W", "ignore", "-c", EACH_IN_A_FORK, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(done.stderr, file=sys.stderr)  # shown if a test fails
    return dict(zip(programs, done.stdout.split(), strict=True))


@pytest.mark.slow
def test_functions_can_be_scripted_in_a_region_and_after_it(statuses: dict[str, str]) -> None:
    """Functions that are patched in a region can be scripted, in it and later, in a new process."""
    assert statuses["scripting"] == "0"


@pytest.mark.slow
def test_functions_can_be_compiled_after_a_region_that_compiled_first(
    statuses: dict[str, str],
) -> None:
    """If Dynamo is first used in a region, when it lists torch's functions, it also works later."""
    assert statuses["compiling"] == "0"


def test_default_device_that_is_first_used_in_a_region_applies_there_and_after_it(
    run_code: Callable[..., str],
) -> None:
    """A default device that is first used in a region applies to
    torch's functions there and later.
    """
    printed = run_code(
        "import torch; from pytest_cka_memory import MemoryProbe\n"
        "assert torch.utils._device._device_constructors.cache_info().currsize == 0\n"
        "with MemoryProbe('cpu').measure(), torch.device('meta'): print(torch.as_tensor([1.0]))\n"
        "with torch.device('meta'): print(torch.as_tensor([1.0]))",
        forked=True,
    )
    assert printed.count("device='meta'") == 2


def test_fake_tensors_can_be_made_in_a_region(probe: MemoryProbe) -> None:
    """Fake tensors, which have no address, can be made in a region."""
    with probe.measure(), FakeTensorMode():
        made = torch.as_tensor([1.0])
    assert type(made) is FakeTensor


def test_a_patch_of_the_user_in_a_region_stays(
    probe: MemoryProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of torch that a user patches in a region stays
    patched until the user undoes it.
    """
    plain = torch.from_numpy
    with probe.measure():
        inner = torch.from_numpy
        monkeypatch.setattr(torch, "from_numpy", lambda given: inner(given))
        mine = torch.from_numpy
    assert torch.from_numpy is mine
    with probe.measure() as region:
        kept = torch.from_numpy(array())
    assert torch.from_numpy is mine
    assert region.retained_bytes == kept.nbytes
    monkeypatch.undo()
    with probe.measure():
        pass
    assert torch.from_numpy is plain


def test_a_storage_that_is_emptied_and_filled_again_is_not_new(probe: MemoryProbe) -> None:
    """A storage that is emptied and filled again, as by FSDP, is not new; only growth counts."""
    old = torch.zeros(100)
    storage = old.untyped_storage()
    for size, growth in ((400, 0), (500, 100)):
        with probe.measure() as region:
            for _ in range(3):
                storage.resize_(0)
                storage.resize_(size)
        assert (region.retained_bytes, region.net_bytes) == (growth, growth)


def test_a_storage_that_cannot_be_resized_raises_as_without_a_region(probe: MemoryProbe) -> None:
    """A failing resize of a storage raises torch's error, and later allocations are counted."""
    with probe.measure() as region:
        fixed = torch.frombuffer(bytearray(8), dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="not resizable"):
            fixed.untyped_storage().resize_(100)
        kept = torch.zeros(10).resize_(20)
    assert region.retained_bytes == 8 + 80
    assert len(kept) == 20


def test_a_tensor_that_moves_to_shared_memory_is_counted_there(probe: MemoryProbe) -> None:
    """A tensor that moves to shared memory counts there; for a moment both copies are live."""
    tensor = torch.zeros(2**16)
    with probe.measure() as region:
        tensor.share_memory_()
    assert (region.retained_bytes, region.net_bytes) == (0, 0)
    assert region.peak_increase_bytes == tensor.nbytes
    with probe.measure() as region:
        del tensor
    assert region.net_bytes == -(2**18)


def test_a_mapped_checkpoint_counts_with_the_size_of_its_file(
    probe: MemoryProbe, tmp_path: Path
) -> None:
    """A mapped checkpoint counts once with the size of its file, however many tensors it has."""
    file = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(1000), "b": torch.zeros(2000)}, file)
    region = probe.run(torch.load, file, mmap=True)
    assert region.retained_bytes == file.stat().st_size
    region.result = None
    gc.collect()
    assert probe.snapshot().allocated_bytes == region.start_bytes


def test_a_storage_on_a_file_counts(probe: MemoryProbe, tmp_path: Path) -> None:
    """A storage on a mapped file counts as any other storage does."""
    file = tmp_path / "data"
    file.write_bytes(bytes(1000))
    region = probe.run(torch.UntypedStorage.from_file, str(file), False, 1000)
    assert region.retained_bytes == 1000


def test_parts_of_a_mapped_file_count_once_and_are_named(
    probe: MemoryProbe, tmp_path: Path
) -> None:
    """Parts of a mapped file, as safetensors makes them, count once with the file and are named."""
    (tmp_path / "file").write_bytes(bytes(4096))
    with probe.measure() as region:
        mapped = torch.UntypedStorage.from_file(str(tmp_path / "file"), False, 4096)
        weights = [torch.asarray(mapped[start:2048], dtype=torch.uint8) for start in (8, 64)]
        del mapped
    assert region.retained_bytes == 4096
    (holding,) = region.retained
    assert str(holding.held_by).startswith("weights[")
    del weights


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no mkldnn here")
def test_tensors_of_mkldnn_count(probe: MemoryProbe) -> None:
    """Tensors of MKL-DNN have no storage, but torch's allocator counts their memory."""
    dense = torch.ones(1000, 1000)
    region = probe.run(dense.to_mkldnn)
    assert region.retained_bytes == dense.nbytes
    region.result = None


@pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch has no fbgemm here"
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_parameters_that_fbgemm_packs_are_not_counted(probe: MemoryProbe) -> None:
    """Weights packed by fbgemm do not count: it allocates them without torch's allocator."""
    weight = torch.quantize_per_tensor(torch.ones(256, 512), 0.1, 0, torch.qint8)
    region = probe.run(torch.ops.quantized.linear_prepack, weight, None)
    assert torch.ops.quantized.linear_unpack(region.result)[0].nbytes == weight.nbytes
    assert region.retained_bytes == 0
