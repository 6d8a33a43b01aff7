"""Run programs of two ranks that go wrong, with NCCL on emulated devices; say how each ended.

python benchmarks/ranks_hostile.py [--cases NAME ...] [--json results.json]

Exits with 1 if a rank hangs, prints something else than is expected here, or leaves shared memory.
Takes six minutes on two cores; no GPU is needed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

START = """
import datetime, os, sys, threading, time
rank, ranks = int(sys.argv[1]), 2
import emulated_cuda
emulated_cuda.load("a100", devices=ranks)
import torch
import torch.distributed as dist

torch.cuda.set_device(rank)
seconds = datetime.timedelta(seconds=8)
store = f"file://{sys.argv[2]}"
dist.init_process_group("nccl", init_method=store, rank=rank, world_size=ranks, timeout=seconds)

def ones(size=4, **options):
    return torch.ones(size, device="cuda", **options)

def in_a_group(group):
    result = ones()
    dist.all_reduce(result, group=group)
    return result[0].item()

def killed(number):
    os.kill(os.getpid(), number)

dist.all_reduce(ones())
open(f"{sys.argv[2]}-{rank}", "w").close()
"""


class Case(NamedTuple):
    """What the ranks run, and what each of them prints, at least."""

    code: str
    expected: tuple[str, str]
    interrupted: bool = False


OTHER_SIZES = "the ranks expect different sizes of a message"
NOT_THE_SAME = "the ranks call different collectives: rank {} calls {}, but rank {} calls {}"
ENDED = ") has ended, while rank 0 waited for it in ncclAllReduce of 4 float32 (sum)"


def differing(code: str, first: str, second: str) -> Case:
    """Return a case in which both ranks must name both calls."""
    messages = (
        NOT_THE_SAME.format(0, first, 1, second),
        NOT_THE_SAME.format(1, second, 0, first),
    )
    return Case(code, messages)


def ending(code: str, second: str = "") -> Case:
    """Return a case in which rank 1 ends, and rank 0 must be told so."""
    return Case(f"if rank: {code}\ndist.all_reduce(ones())", (ENDED, second))


def alike(code: str, expected: str) -> Case:
    """Return a case in which both ranks print the same."""
    return Case(code, (expected, expected))


SUM = "ncclAllReduce of 4 float32 (sum)"
CASES = {
    "another size": differing(
        "dist.all_reduce(ones(4 + rank))", SUM, "ncclAllReduce of 5 float32 (sum)"
    ),
    "another type": differing(
        "dist.all_reduce(ones(dtype=(torch.float, torch.double)[rank]))",
        *(SUM, "ncclAllReduce of 4 float64 (sum)"),
    ),
    "another reduction": differing(
        "dist.all_reduce(ones(), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[rank])",
        *(SUM, "ncclAllReduce of 4 float32 (maximum)"),
    ),
    "another root": differing(
        "dist.broadcast(ones(), rank)",
        *("ncclBroadcast of 4 float32 with root 0", "ncclBroadcast of 4 float32 with root 1"),
    ),
    "another collective": differing(
        "dist.all_gather_into_tensor(ones(8), ones()) if rank else dist.all_reduce(ones())",
        *(SUM, "ncclAllGather of 4 float32"),
    ),
    "a message longer than what receives it": Case(
        "dist.recv(ones(2), 0) if rank else dist.send(ones(4), 1)",
        (
            "",
            f"{OTHER_SIZES}: rank 0 sends 16 bytes, but rank 1 receives 8",
        ),
    ),
    "a message shorter than what receives it": Case(
        "dist.recv(ones(8), 0) if rank else dist.send(ones(4), 1)",
        (
            "",
            f"{OTHER_SIZES}: rank 0 sends 16 bytes, but rank 1 receives 32",
        ),
    ),
    "a collective that one rank never calls": Case(
        "time.sleep(20) if rank else dist.all_reduce(ones())\ntorch.cuda.synchronize()",
        ("Operation timed out after 8", ""),
    ),
    "an exception in one rank": ending("raise ValueError('of rank 1')", "ValueError: of rank 1"),
    "one rank exits": ending("sys.exit(3)"),
    "one rank is out of memory": ending("ones(10**12)", "CUDA out of memory"),
    "SIGKILL": ending("killed(9)"),
    "SIGSEGV": ending("killed(11)"),
    "SIGTERM": ending("killed(15)"),
    "SIGKILL inside a collective": ending(
        "threading.Timer(1, killed, [9]).start(); time.sleep(5); dist.all_reduce(ones())"
    ),
    "ctrl-C while one rank waits": Case(
        "if rank: time.sleep(100)\ndist.all_reduce(ones())\ntorch.cuda.synchronize()",
        ("", "KeyboardInterrupt"),
        interrupted=True,
    ),
    "a collective in a forked process": alike(
        """child = os.fork()
if child == 0:
    try:
        dist.all_reduce(ones())
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("the parent goes on", in_a_group(None))""",
        "the parent goes on 2.0",
    ),
    "30 groups, one made after the other is used": alike(
        "print(sum(in_a_group(dist.new_group([0, 1])) for _ in range(30)))", "60.0"
    ),
    "1,000 communicators": alike(
        """for _ in range(1000):
    group = dist.new_group([0, 1])
    found = in_a_group(group)
    dist.destroy_process_group(group)
print("1,000 groups", found)""",
        "1,000 groups 2.0",
    ),
    "two groups in another order, each waited for": Case(
        """groups = [dist.new_group([0, 1], timeout=seconds) for _ in range(2)]
for group in groups:
    in_a_group(group)
for group in groups[:: 1 - 2 * rank]:
    dist.all_reduce(ones(), group=group)
torch.cuda.synchronize()""",
        ("Operation timed out after 8", "Operation timed out after 8"),
    ),
    "a group without this rank": alike("print(in_a_group(dist.new_group([0])))", "1.0"),
    "a group after it was destroyed": alike(
        "dist.destroy_process_group(); dist.all_reduce(ones())",
        "Default process group has not been initialized",
    ),
    "exit while work is pending": alike(
        "dist.all_reduce(ones(10**6), async_op=True); print('end')", "end"
    ),
    "abort while work is pending": Case(
        """if rank:
    time.sleep(4)
    sys.exit()
work = dist.all_reduce(ones(), async_op=True)
dist.distributed_c10d._get_default_group()._get_backend(torch.device("cuda")).abort()
print("aborted")""",
        ("aborted", ""),
    ),
    "a collective in another thread": alike(
        """def in_thread():
    torch.cuda.set_device(rank)
    print("in a thread", in_a_group(None))
thread = threading.Thread(target=in_thread)
thread.start(), thread.join()""",
        "in a thread 2.0",
    ),
    "a tensor on the CPU": alike("dist.all_reduce(torch.ones(3))", "No backend type associated"),
    "a tensor on the other rank's device": alike(
        "dist.all_reduce(torch.ones(3, device=f'cuda:{1 - rank}'))", "Expected tensor on cuda:"
    ),
}


def run(case: Case) -> dict[str, Any]:
    """Run both ranks; return what each printed, how it ended, and after which time."""
    before = segments()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        script, store = Path(folder) / "ranks.py", Path(folder) / "store"
        script.write_text(f"{START}\n{case.code}\n", encoding="utf-8")
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(store)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        while not all(Path(f"{store}-{rank}").exists() for rank in range(2)):
            time.sleep(0.1)
        if case.interrupted:
            time.sleep(2)
            for process in ranks:
                process.send_signal(signal.SIGINT)
        begun = time.monotonic()

        def wait(process: "subprocess.Popen[str]") -> tuple[str, float]:
            try:
                output, _ = process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()[0] + "HUNG"
            return output, round(time.monotonic() - begun, 1)

        outputs, seconds = zip(*pool.map(wait, ranks), strict=True)
    return {
        "statuses": [process.returncode for process in ranks],
        "seconds": list(seconds),
        "printed": [
            shown(output, expected) for output, expected in zip(outputs, case.expected, strict=True)
        ],
        "left": sorted(segments() - before),
    }


def segments() -> set[str]:
    """Return the names of shared memory; those of multiprocessing's semaphores are not NCCL's."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def shown(output: str, expected: str) -> str:
    """Return the line with what is expected, or, if there is none, the last line."""
    lines = [line for line in output.splitlines() if line.strip()] or [""]
    with_it = [line for line in lines if expected and expected in line]
    return (with_it or lines)[-1].strip()[:300]


def main() -> None:
    """Print how each case ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    # A shell lets programs in the background ignore ctrl-C, and their processes with them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found, wrong = {}, []
    for name in args.cases:
        found[name] = run(CASES[name])
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
        pairs = zip(found[name]["printed"], CASES[name].expected, strict=True)
        if found[name]["left"] or not all(
            expected in line and "HUNG" not in line for line, expected in pairs
        ):
            wrong.append(name)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(
        f"{len(found) - len(wrong)} of {len(found)} as expected" + "".join(f"; {n}" for n in wrong)
    )
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
