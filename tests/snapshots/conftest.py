"""Programs that are recorded once for all tests."""

import json
import os
from pathlib import Path

import forked_processes
import pytest

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
