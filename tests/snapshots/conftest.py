"""Programs that are recorded once for all tests."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import forked_processes
import pytest

from pytest_cka_memory.snapshots import replays

PROGRAMS = Path(__file__).with_name("recorded_programs.py")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Return a function that runs programs under a setting; name -> path and own figures."""

    def record(setting, *arguments):
        folder = tmp_path_factory.mktemp("recorded")
        environment = {
            **os.environ,
            "PYTORCH_ALLOC_CONF": setting,
            "PYTORCH_CUDA_ALLOC_CONF": setting,
        }
        words = ["python", str(PROGRAMS), str(folder), *arguments]
        done = forked_processes.run(words, environment=environment)
        assert done.returncode == 0, done.stderr
        return {
            path.stem: (path, json.loads(path.with_suffix(".json").read_text("utf-8")))
            for path in sorted(folder.glob("*.pickle"))
        }

    return record


@pytest.fixture
def forked_replays(monkeypatch):
    """Fork the process of each replay, which has imported torch already. Other tests start one."""
    python = SimpleNamespace(executable=forked_processes.interpreter())
    monkeypatch.setattr(replays, "sys", python)
