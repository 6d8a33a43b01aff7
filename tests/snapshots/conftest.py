"""Programs that are recorded once for all tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
        words = [sys.executable, str(PROGRAMS), str(folder), *arguments]
        subprocess.run(words, env=environment, check=True)
        return {
            path.stem: (path, json.loads(path.with_suffix(".json").read_text("utf-8")))
            for path in sorted(folder.glob("*.pickle"))
        }

    return record
