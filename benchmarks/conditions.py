"""Under which conditions something was measured: date, commit, versions, processor."""

import os
import platform
import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def conditions(packages: Iterable[str] = ("torch",)) -> dict[str, object]:
    """Return what stands beside a result, with the versions of these packages."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in packages},
    }


def commit() -> str | None:
    """Return the short hash of the checkout's commit; none outside a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def processor() -> str:
    """Return the name of the processor, as the system gives it."""
    file = Path("/proc/cpuinfo")
    names = file.read_text("utf-8").splitlines() if file.exists() else []
    models = [line.partition(":")[2].strip() for line in names if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
