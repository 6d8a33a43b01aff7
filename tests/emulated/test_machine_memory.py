"""Memory of this machine, which may be less than that of the card."""

import pytest

PROGRAM = """
import ctypes, os, pathlib, sys
import emulated_cuda
emulated_cuda.load("a100", values=sys.argv[2] == "on")
import torch
from emulated_cuda.loading.library import LIBRARY, path_of_compiled

MB = 2**20
library = ctypes.CDLL(path_of_compiled(LIBRARY))
root = pathlib.Path(sys.argv[1])

def machine(total, available, swap=0, **files):
    texts = {
        "proc/meminfo": f"MemTotal: {total << 10} kB\\nMemFree: 9 kB\\n"
                        f"MemAvailable: {available << 10} kB\\nSwapFree: {swap << 10} kB\\n",
        "proc/self/cgroup": "", **files}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    library.emulated_machine_at(os.fsencode(root))

def ask(size):
    torch.cuda.empty_cache()
    try:
        torch.empty(size * MB, dtype=torch.uint8, device="cuda")
        return "allocated"
    except RuntimeError as error:
        return "refused" if "out of memory of this machine" in str(error) else str(error)

"""
VERSION_2 = """
group = "sys/fs/cgroup/a/b"
files = {"proc/self/cgroup": "0::/a/b\\n", "sys/fs/cgroup/a/memory.max": str(1000 * MB),
         "sys/fs/cgroup/a/memory.current": str(900 * MB), f"{group}/memory.max": "max\\n",
         f"{group}/memory.current": str(500 * MB), "sys/fs/cgroup/a/memory.swap.max": "0"}
"""
VERSION_1 = """
group = "sys/fs/cgroup/memory/a"
files = {"proc/self/cgroup": "5:cpu,memory:/a\\n", f"{group}/memory.limit_in_bytes": str(1000 * MB),
         f"{group}/memory.usage_in_bytes": str(900 * MB)}
"""


@pytest.fixture
def run(python, tmp_path):
    """Return a function that runs code after `PROGRAM` and returns the lines that it prints."""

    def run(code: str, values: str = "on", **variables: str) -> list[str]:
        done = python("-c", PROGRAM + code, str(tmp_path), values, forked=True, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


ASKS = """
for total, available, swap, size in [
    (16000, 1000, 0, 900), (16000, 1000, 0, 400), (16000, 2100, 0, 2000), (16000, 1000, 4000, 900),
    (16000, 100, 0, 2), (16000, 15000, 0, 30000),
]:
    machine(total, available, swap)
    print(ask(size))
torch.cuda.empty_cache()
machine(16000, 1000)
try:
    torch.empty(900 * MB, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    print(type(error) is torch.OutOfMemoryError, str(error).splitlines()[0])
print(torch.cuda.mem_get_info()[1] >> 20, (torch.ones(3, device="cuda") + 1).sum().item())
"""


def test_machine_that_is_full_is_named_in_the_error(run):
    """The error is not that of a full card, and says what to do; the device stays usable.

    It is raised if less than an eighth is left, and not even twice what was asked for.
    """
    *asks, error, after = run(ASKS)
    refused, allocated = "refused", "allocated"
    assert asks == [refused, allocated, allocated, allocated, refused, allocated]
    assert error.startswith(
        "False CUDA error: out of memory of this machine, not of the emulated card: 900 MB were "
        "asked for, but only 1000 of 16000 MB are available"
    )
    assert "--no-values" in error
    assert after == "81152 6.0"


def test_without_values_the_machine_need_not_have_the_memory(run):
    """Nothing is written on the devices then."""
    assert run("machine(16000, 100)\nprint(ask(30000))", values="off") == ["allocated"]


def test_expandable_segment_counts_as_a_whole(run):
    """Its pieces are allocated one after the other, before any of them is written."""
    lines = run(
        "machine(16000, 1000)\nprint(ask(900))\nprint(ask(100))",
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
    )
    assert lines == ["refused", "allocated"]


def test_cached_blocks_are_freed_before_the_machine_is_full(run):
    """Torch's allocator gives back what it caches and tries again, as if the card were full."""
    lines = run("""
kept = torch.empty(800 * MB, dtype=torch.uint8, device="cuda")
del kept
machine(16000, 1000)
try:
    torch.empty(900 * MB, dtype=torch.uint8, device="cuda")
except RuntimeError:
    print(torch.cuda.memory_reserved())
""")
    assert lines == ["0"]


@pytest.mark.parametrize("files", [VERSION_2, VERSION_1], ids=["version 2", "version 1"])
def test_limit_of_a_control_group_counts(run, files):
    """The memory of a container is that of its control group, without cached files."""
    statistics = "inactive_file" if files is VERSION_2 else "total_inactive_file"
    folder = "sys/fs/cgroup/a" if files is VERSION_2 else "sys/fs/cgroup/memory/a"
    lines = run(f"""{files}
machine(16000, 15000, 0, **files)
print(ask(90))
files["{folder}/memory.stat"] = f"anon 5\\n{statistics} {{800 * MB}}\\n"
machine(16000, 15000, 0, **files)
print(ask(90))
""")
    assert lines == ["refused", "allocated"]
