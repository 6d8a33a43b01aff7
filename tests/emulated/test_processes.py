"""Other allocators, other processes, compiled code, and the end of the process."""

import os
import sys
import tempfile

import pytest

from emulated_cuda.loading.loaded import folder_of_driver

ALLOCATOR = """
import emulated_cuda
MB = 2**20
emulated_cuda.load("a100", 2, total_bytes=1536 * MB)
import torch
def filled(size, device="cuda"):
    return torch.empty(size, dtype=torch.uint8, device=device)
kept = [filled(size * MB) for size in (4, 8, 12, 16, 20)]
levels = [(torch.cuda.memory_allocated() // MB, torch.cuda.memory_reserved() // MB)]
del kept[1]
torch.cuda.empty_cache()
levels.append((torch.cuda.memory_allocated() // MB, torch.cuda.memory_reserved() // MB))
levels.append((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) // MB)
values = torch.arange(100_000)
assert torch.equal(values.cuda().clone().to("cuda:1").cpu(), values)
try:
    filled(1025 * MB)
except torch.cuda.OutOfMemoryError:
    kept.clear()
    torch.cuda.empty_cache()
    levels.append(filled(900 * MB).numel() // MB)
try:
    torch.multiprocessing.reductions.reduce_tensor(torch.ones(1, device="cuda"))
except RuntimeError as error:
    levels.append("cuMemExportToShareableHandle is not supported" in str(error))
print(torch.cuda.get_allocator_backend(), levels)
"""


def test_expandable_segments_map_and_unmap_memory(python):
    """The reserve of expandable segments grows by pages; other processes refuse their tensors."""
    run = python("-c", ALLOCATOR, forked=True, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    expected = [(60, 60), (52, 60), 572, 900, True]
    assert run.stdout.strip() == f"native {expected}", run.stderr


@pytest.mark.slow
def test_asynchronous_allocations_come_from_the_devices_pool(python):
    """The pool of ``cudaMallocAsync`` grows by chunks of 32 MB, and is trimmed to what is used."""
    # Torch reads which allocator to use when it is imported.
    run = python("-c", ALLOCATOR, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert run.stdout.startswith("cudaMallocAsync [(60, 64), (52, 64), 576, 900"), run.stderr


MODULE = """
import torch
import emulated_cuda

def measure(answers):
    kept = torch.ones(1000, device="cuda")
    answers.put((torch.cuda.get_device_name(), torch.cuda.device_count(),
                 torch.cuda.memory_allocated(), emulated_cuda.loaded().card.name,
                 kept.mul(2).sum().item()))

def use(answers):
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        answers.put(str(error))
"""
SPAWN = """
import emulated_cuda
if __name__ == "__main__":
    emulated_cuda.load("h100", 2)
    import module, torch
    torch.ones(1, device="cuda")
    for method, function in (("spawn", module.measure), ("forkserver", module.measure),
                             ("fork", module.use)):
        context = torch.multiprocessing.get_context(method)
        answers = context.Queue()
        process = context.Process(target=function, args=(answers,))
        process.start()
        print(method, answers.get(timeout=120))
        process.join()
        assert process.exitcode == 0
"""


@pytest.mark.slow
def test_spawned_processes_have_the_device_and_forked_ones_are_refused_by_torch(python, tmp_path):
    """A spawned process loads the device before its main module, and computes values.

    Torch refuses forked ones. This is a new interpreter, because the server of ``forkserver`` must
    not have been started before.
    """
    (tmp_path / "module.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "main.py").write_text(SPAWN, encoding="utf-8")
    run = python(str(tmp_path / "main.py"), PYTHONPATH=":".join(filter(None, sys.path)))
    seen = ("NVIDIA H100 80GB HBM3", 2, 4096, "h100", 2000.0)
    spawn, forkserver, fork = run.stdout.splitlines()
    assert [spawn, forkserver] == [f"spawn {seen}", f"forkserver {seen}"], run.stderr
    assert fork.startswith("fork Cannot re-initialize CUDA in forked subprocess"), run.stderr


PATH_AS_OF_THE_PARENT = '''
import emulated_cuda
emulated_cuda.load("t4")
import os, subprocess, sys
print(subprocess.run(
    [sys.executable, "-c", """
import ctypes, emulated_cuda
ctypes.CDLL("libnvidia-ml.so.1")  # loads the device, as the import of torch does, but sooner
print(emulated_cuda.loaded().card.name)
"""],
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    capture_output=True, text=True,
))
'''


def test_a_process_whose_path_is_that_of_its_parent_has_the_device(python):
    """A program that makes PYTHONPATH from ``sys.path``, as Inductor does, passes the device on."""
    run = python("-c", PATH_AS_OF_THE_PARENT)
    assert "stdout='t4\\n'" in run.stdout, run.stdout + run.stderr


COMPILED = """
import emulated_cuda
emulated_cuda.load("a100")
import os, torch
print(sorted(os.listdir(os.environ["TRITON_LIBCUDA_PATH"])))

@torch.compile
def program(rows):
    return torch.nn.functional.gelu(rows).sum()

rows = torch.ones(64, 64, device="cuda")
print(program(rows).shape, torch.cuda.max_memory_allocated() < 2 * rows.nbytes)
"""


@pytest.mark.slow
def test_compiled_code_launches_triton_kernels(python, tmp_path):
    """Triton links against the driver in a folder that has the names of the driver.

    Its one kernel needs no memory for what eager code would write between the operators.
    """
    caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), str(tmp_path))
    run = python("-c", COMPILED, forked=True, **caches)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["['libcuda.so', 'libcuda.so.1']", "torch.Size([]) True"]


KILLED = """
import os, signal
import emulated_cuda
emulated_cuda.load("a100")
print(os.environ["TRITON_LIBCUDA_PATH"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_processes_leave_one_folder_that_the_next_process_uses(python, tmp_path):
    """Processes of one user share the folder for Triton, so that no number of kills adds to it."""
    runs = [python("-c", KILLED, TMPDIR=str(tmp_path)) for _ in range(2)]
    folders = {run.stdout.strip() for run in runs}
    assert folders == {str(path) for path in tmp_path.glob("emulated-cuda-*")}, runs[0].stderr
    assert len(folders) == 1


@pytest.mark.parametrize("unsafe", ["open to others", "a link"])
def test_folder_that_others_could_have_made_is_not_used(tmp_path, monkeypatch, unsafe):
    """Triton links against a driver that nobody else can replace."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = folder_of_driver("/lib/driver.so")
    if unsafe == "a link":
        expected.rename(tmp_path / "elsewhere")
        expected.symlink_to(tmp_path / "elsewhere")
    else:
        expected.chmod(0o777)
    used = folder_of_driver("/lib/driver.so")
    assert used != expected
    assert os.readlink(used / "libcuda.so.1") == "/lib/driver.so"


ENDING = """
import emulated_cuda
emulated_cuda.load("a100")
import os, sys, threading, torch
one = {min(os.sched_getaffinity(0))}
for _ in range(3):  # processes, each of which runs what follows and ends as an interpreter does
    child = os.fork()
    if child == 0:
        break
    assert os.waitpid(child, 0)[1] == 0
else:
    sys.exit()

class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        thread = threading.get_native_id()
        os.sched_setaffinity(thread, one)
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        raise RuntimeError("this pass fails")

os.sched_setaffinity(0, one)
sys.setswitchinterval(1000)
try:
    Failing.apply(torch.ones(1000, device="cuda", requires_grad=True)).sum().backward()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_process_that_ends_right_after_a_backward_pass_does_not_abort(python):
    """Processes end cleanly although a backward thread still holds Python objects.

    They are forked from a new interpreter, because others do not end as an interpreter does.
    """
    run = python("-c", ENDING)
    assert (run.returncode, run.stdout) == (0, "this pass fails\n" * 3), run.stderr
