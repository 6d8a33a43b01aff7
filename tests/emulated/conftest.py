"""Tests of the emulated device: each loads it in a process of its own, because it stays loaded."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked_processes
import pytest

ROOT = Path(__file__).parents[2]
_REMOVED = ("PYTORCH_", "TORCH_", "CUDA_", "CUBLAS", "TRITON_", "NUMBA_", "PYTEST_", "CI")


@pytest.fixture(scope="session")
def python(emulation: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in an environment without CUDA settings.

    It is a new interpreter, or a process that has imported torch already (``forked=True``). So may
    be the processes that it starts (``forked_children=True``).
    """
    environment = {name: v for name, v in os.environ.items() if not name.startswith(_REMOVED)}
    environment.update(OMP_NUM_THREADS="1", COLUMNS="100", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    environment["DISABLE_PTXAS_OPT"] = "1"  # no card runs the machine code of Triton's kernels

    def run(
        *args: str, forked: bool = False, forked_children: bool = False, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        given = {**environment, **variables}
        if forked or forked_children:
            return forked_processes.run(
                ["python", *args],
                folder=ROOT,
                environment=given,
                with_children=forked_children,
            )
        return subprocess.run(
            [sys.executable, *args],
            env=given,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    return run


START = """
import emulated_cuda, os, sys
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
emulated_cuda.load("a100", devices=ranks, values=sys.argv[4] == "on")
import torch
import torch.distributed as dist
torch.cuda.set_device(rank)
store = f"file://{sys.argv[3]}"
dist.init_process_group(sys.argv[5], init_method=store, rank=rank, world_size=ranks)
"""
"""Starts a rank of a process group: what its code begins with."""


@pytest.fixture
def nccl(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    """Run code on the ranks of a process group of NCCL, each with an emulated device.

    Another `backend` may be given.
    """

    def run(
        code: str, ranks: int = 2, values: str = "on", backend: str = "nccl", **variables: str
    ) -> list[subprocess.CompletedProcess[str]]:
        script, store = tmp_path / "rank.py", tmp_path / "store"
        script.write_text(f"{START}\n{code}", encoding="utf-8")
        store.unlink(missing_ok=True)

        def run_rank(rank: int) -> subprocess.CompletedProcess[str]:
            given = str(script), str(rank), str(ranks), str(store), values, backend
            return python(*given, forked=True, **variables)

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(run_rank, range(ranks)))

    return run
