"""Run programs whose compiled code goes wrong on an emulated device; say how each ended.

python benchmarks/compiled_hostile.py [--cases NAME ...] [--json results.json]

Exits with 1 if a program does not end, or prints something else than is expected here. No GPU is
needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 400
"""Seconds that a program gets. Most take a few."""
START = """
import os, sys, threading, time
import emulated_cuda
emulated_cuda.load("a100", **({"values": False} if "--without" in sys.argv else {}))
import torch
import triton
import triton.language as tl

@triton.jit
def copy(out, x, offset, size: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at + offset, tl.load(x + at))

@triton.jit
def read(out, x, offset, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(out + at, tl.load(x + at + offset))

@triton.jit
def endless(out):
    while tl.load(out) == 0:
        tl.store(out + 1, 1)

@triton.jit
def waiting(lock, out):
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(out, 1)

@triton.jit
def asserting(x):
    tl.device_assert(tl.load(x) > 5, "too small")

@triton.jit
def slow(out, n):
    for i in range(n):
        tl.store(out + i % 8, tl.load(out + i % 8) + 1)

@triton.jit
def product(out, x, size: tl.constexpr):
    at = tl.arange(0, size)
    both = at[:, None] * size + at[None, :]
    block = tl.load(x + both)
    tl.store(out + both, tl.dot(block, block))

def ones(n=64, **options):
    return torch.ones(n, device="cuda", **options)

def works():
    out = torch.zeros(64, device="cuda")
    copy[(4,)](out, ones(), 0, size=16)
    return "works" if out.sum().item() == 64 else "broken"

def attempt(call):
    try:
        call()
        torch.cuda.synchronize()
        print("no error")
    except BaseException as error:
        print(type(error).__name__, " ".join(str(error).split()))
    print("after it, a kernel", works())
"""


class Case(NamedTuple):
    """A program, and patterns of what it prints, one after the other."""

    code: str
    expected: str
    goes_on: bool = True
    """Whether it must say afterwards that another kernel works."""
    interrupted: bool = False
    arguments: tuple[str, ...] = ()


CASES = {
    "a store far outside": Case(
        "attempt(lambda: copy[(1,)](ones(), ones(), 2**40, size=16))",
        "illegal memory access .* kernel copy writes 4 bytes at 0x",
    ),
    "a load far outside": Case(
        "attempt(lambda: read[(1,)](ones(), ones(), -(2**40), size=16))",
        "illegal memory access .* kernel read reads 4 bytes at 0x",
    ),
    "a store between elements": Case(
        "x = ones(dtype=torch.int8)\n"
        "attempt(lambda: copy[(1,)](x[1:5].view(torch.int8), ones(dtype=torch.int8), 0, size=4))\n"
        "print('bytes have no place between them')",
        "no error",
    ),
    "a store at an address of the host": Case(
        "host = torch.ones(64)\n"
        "class Wild:\n"
        "    dtype = torch.float32\n"
        "    def data_ptr(self): return torch.cuda.current_stream().cuda_stream or 64\n"
        "attempt(lambda: copy[(1,)](Wild(), ones(), 0, size=16))",
        "illegal memory access|cannot be accessed from Triton|invalid|misaligned",
    ),
    "a tensor on the CPU": Case(
        "attempt(lambda: copy[(1,)](torch.ones(64), ones(), 0, size=16))",
        r"ValueError Pointer argument .*cannot be accessed from Triton \(cpu tensor\?\)",
    ),
    "pinned memory of the host": Case(
        "host = torch.zeros(64).pin_memory()\n"
        "attempt(lambda: copy[(4,)](host, ones(), 0, size=16))\nprint(host.sum().item())",
        "64.0",
    ),
    "a text in place of a number": Case(
        "attempt(lambda: copy[(1,)](ones(), ones(), 'far', size=16))",
        "(TypeError|ValueError|KeyError|AttributeError|CompilationError)",
    ),
    "too few arguments": Case(
        "attempt(lambda: copy[(1,)](ones(), size=16))", "TypeError .*missing .*argument"
    ),
    "a block that is not a power of two": Case(
        "attempt(lambda: copy[(1,)](ones(), ones(), 0, size=12))", "power of 2"
    ),
    "more shared memory than the card has": Case(
        "x = torch.ones(256, 256, device='cuda')\nattempt(lambda: product[(1,)](x, x, size=256))",
        "OutOfResources out of resource: (shared memory|tensor memory|threads)",
    ),
    "a grid of no programs": Case(
        "attempt(lambda: copy[(0,)](ones(), ones(), 0, size=16))", "no error"
    ),
    "a loop that never ends": Case(
        "attempt(lambda: endless[(1,)](torch.zeros(2, device='cuda')))",
        "timed out and was terminated: a loop of the kernel endless did not end",
    ),
    "a lock that is never free": Case(
        "lock = ones(1, dtype=torch.int32)\nattempt(lambda: waiting[(2,)](lock, ones()))",
        "timed out and was terminated: a loop of the kernel waiting did not end",
    ),
    "an assertion that fails": Case(
        "os.environ['TRITON_DEBUG'] = '1'\nimport triton.knobs\n"
        "attempt(lambda: asserting[(1,)](ones(), debug=True))",
        "assert.*too small",
    ),
    "ctrl-C in a kernel": Case(
        "print('begun', flush=True)\n"
        "attempt(lambda: [slow[(1,)](ones(), 200_000) for _ in range(1000)])",
        "KeyboardInterrupt",
        interrupted=True,
    ),
    "launches from eight threads": Case(
        """found = []
threads = [threading.Thread(target=lambda: found.append(works())) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(found.count("works"), "threads")""",
        "8 threads",
        goes_on=False,
    ),
    "two processes that compile at once": Case(
        """import subprocess
if "--child" in sys.argv:
    print("child", works())
    sys.exit()
both = [
    subprocess.Popen([sys.executable, __file__, "--child"], stdout=-1, text=True) for _ in range(2)
]
print(*[process.communicate()[0].strip() for process in both])""",
        "child works child works",
        goes_on=False,
    ),
    "a forked process": Case(
        """print(works(), flush=True)
child = os.fork()
if child == 0:
    try:
        print("in the child:", works(), flush=True)
    except RuntimeError as error:
        print("in the child:", error, flush=True)
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1], works())""",
        "(?s)in the child: .*(Cannot re-initialize CUDA in forked subprocess|works).*"
        "ended with 0 works",
        goes_on=False,
    ),
    "reading a value in a capture": Case(
        """x = ones()
def capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
works()
attempt(capture)""",
        "operation (not permitted when stream is capturing|failed due to a previous error)",
    ),
    "a capture that is left open": Case(
        """works()
stream = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    graph.capture_begin()
    copy[(4,)](ones(), ones(), 0, size=16)
print("left open")
sys.exit(7)""",
        "left open",
        goes_on=False,
    ),
    "an exception in a capture": Case(
        """def capture():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        copy[(4,)](ones(), ones(), 0, size=16)
        raise LookupError("of the user")
works()
attempt(capture)""",
        "LookupError of the user",
    ),
    "a wild store in a replay": Case(
        """works()
x, graph = ones(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    copy[(1,)](x, x, 2**40, size=16)
attempt(graph.replay)""",
        "illegal memory access .* kernel copy writes 4 bytes",
    ),
    "a cache with broken files": Case(
        """print(works())
from pathlib import Path
for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.ttir"):
    path.write_text("module { broken")
import subprocess
if "--child" not in sys.argv:
    ended = subprocess.run(
        [sys.executable, __file__, "--child"], stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    print("child", ended.returncode, *ended.stdout.splitlines()[-1:])""",
        "(?s)works.*child .*(StaleValueError|works|Error)",
        goes_on=False,
    ),
    "a package of AOTInductor": Case(
        """def package():
    model = torch.nn.Linear(8, 8).cuda()
    exported = torch.export.export(model, (torch.ones(2, 8, device="cuda"),))
    torch._inductor.aoti_compile_and_package(exported)
attempt(package)""",
        "AOTInductor",
    ),
    "kernels without values": Case(
        "out = torch.zeros(64, device='cuda')\ncopy[(4,)](out, ones(), 0, size=16)\n"
        "print(torch.cuda.memory_allocated())",
        r"\d+",
        goes_on=False,
        arguments=("--without",),
    ),
}


def run(case: Case) -> dict[str, Any]:
    """Run a program; return what it printed, how it ended, and after which time."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "program.py"
        script.write_text(f"{START}\n{case.code}\n", encoding="utf-8")
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), *case.arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": f"{folder}/cache"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        begin = ""
        if case.interrupted:
            assert process.stdout is not None
            while "begun" not in begin and process.poll() is None:
                begin += process.stdout.readline()
            time.sleep(15)  # until the kernel is compiled and runs
            process.send_signal(signal.SIGINT)
        try:
            output = begin + process.communicate(timeout=LONGEST)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = begin + process.communicate()[0] + "\nDID NOT END"
    text = re.sub(r"/\S*?(?=site-packages/)", "", output.replace(folder, "FOLDER"))
    is_expected = bool(re.search(case.expected, text)) and "DID NOT END" not in text
    return {
        "expected": is_expected and (not case.goes_on or "a kernel works" in text),
        "status": process.returncode,
        "seconds": round(time.monotonic() - begun, 1),
        "printed": [line[:300] for line in text.splitlines() if line.strip()][-3:],
    }


def main() -> int:
    """Print how each case ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # A shell lets programs in the background ignore ctrl-C, and their processes with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = {}
    for name in args.cases:
        found[name] = run(CASES[name])
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
    wrong = [name for name, one in found.items() if not one["expected"]]
    print(f"{len(found) - len(wrong)} of {len(found)} as expected", *wrong, sep="; ")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
