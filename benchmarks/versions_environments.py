"""New environments with given versions, in which `versions.py` runs its steps."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from versions_steps import Environment

ROOT = Path(__file__).parents[1]
NEWEST, PRE_RELEASE = "newest", "pre-release"
FOR_OPINFO = ("expecttest", "scipy")
_VERSION = re.compile(r"[\w.+-]+")
_IS_PRE_RELEASE = re.compile(r"\d(?:a|b|rc|\.dev)\d")
_IS_INSTALLED = (
    "import sys; from importlib.metadata import distributions as found; "
    "sys.exit(not any(each.name == 'pytest-cka-memory' for each in found()))"
)
_IS_IT = "import sys; sys.exit('%d.%d' % sys.version_info[:2] != sys.argv[1])"


class NotFoundError(Exception):
    """There is no such version of torch or Python here."""


class Versions(NamedTuple):
    """What is installed for one row; None stands for this Python, or for the newest version."""

    torch: str
    python: str | None = None
    pytest: str | None = None
    xdist: str | None = None

    @classmethod
    def read(cls, text: str) -> "Versions":
        """Read such as ``2.9.1`` or ``2.9.1,python=3.10,pytest=8.4.0``.

        Raises:
            argparse.ArgumentTypeError: if a part of it has no meaning.
        """
        torch, *parts = text.split(",")
        found = dict(part.partition("=")[::2] for part in parts)
        names = cls._fields[1:]
        are_versions = all(map(_VERSION.fullmatch, (torch, *found.values())))
        if not are_versions or not found.keys() <= {*names}:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a version of torch, which may be followed by "
                f"{', '.join(f',{name}=VERSION' for name in names)}"
            )
        return cls(torch, **found)


def interpreter(version: str | None) -> str:
    """Return the Python interpreter of a version such as ``3.12``; by default, this one.

    Raises:
        NotFoundError: if none is found.
    """
    if version is None:
        return sys.executable
    found = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found += [str(path / "bin" / "python3") for path in sorted(pyenv.glob(f"{version}.*"))]
    if shutil.which("uv"):
        asked = subprocess.run(
            ["uv", "python", "find", "--no-python-downloads", version],
            capture_output=True,
            text=True,
            check=False,
        )
        found.append(asked.stdout.strip())
    for path in found:
        if (
            path
            and not subprocess.run(
                [path, "-c", _IS_IT, version.removesuffix("t")], check=False, capture_output=True
            ).returncode
        ):
            return path
    raise NotFoundError(
        f"there is no python{version} on the PATH, and none of pyenv; install it, or name another"
    )


def check_pre_release(pip: Sequence[str], environment: dict[str, str]) -> None:
    """Ask pip which pre-release it would install, before it is downloaded.

    Args:
        pip: the command that installs pre-releases from the right index.
        environment: its environment variables.

    Raises:
        NotFoundError: if the newest version is no pre-release.
        subprocess.CalledProcessError: if pip finds no version.
    """
    asked = [*pip, "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", "torch"]
    found = subprocess.run(asked, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    (chosen,) = json.loads(found.stdout)["install"]
    version = chosen["metadata"]["version"]
    if not _IS_PRE_RELEASE.search(version):
        raise NotFoundError(
            f"the newest torch that pip finds is {version}, which is not a pre-release; name an "
            f"index of nightly builds with --index or $TORCH_INDEX"
        )


@contextmanager
def fresh(asked: Versions, index: str | None) -> Iterator[Environment]:
    """Install a version of torch and this project into a new environment, removed at the end.

    Args:
        asked: the versions.
        index: address of the index that has pre-releases of torch; by default where pip looks.

    Raises:
        NotFoundError: if there is no such Python, or if the newest torch is not a pre-release.
        subprocess.CalledProcessError: if something cannot be installed.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cka-memory-") as folder:
        venv = Path(folder) / "venv"
        subprocess.run([interpreter(asked.python), "-m", "venv", venv], check=True)
        environment = Environment(venv, ROOT)
        torch = asked.torch
        wanted = {"torch": torch, "pytest": asked.pytest, "pytest-xdist": asked.xdist}
        unnamed = (None, NEWEST, PRE_RELEASE)
        pins = [f"{name}=={pin}" for name, pin in wanted.items() if pin not in unnamed]
        names = ["torch", "torchvision", *FOR_OPINFO, *pins, "-e", f"{ROOT}[test]"]
        given = dict(os.environ)
        if torch in unnamed or not shutil.which("uv"):
            install = [environment.python, "-m", "pip", "install", "--quiet"]
            subprocess.run([*install, "--upgrade", "pip"], check=True, env=given)
        else:
            install = ["uv", "pip", "install", "--quiet", "--python", environment.python]
        if torch != NEWEST:  # a version that is named may be newer than a cap of this machine
            given["PIP_CONSTRAINT"] = os.devnull
        if torch == PRE_RELEASE:
            found_in = ["--index-url", index] if index else []
            # Before the rest, which is not in an index of nightly builds and keeps this torch.
            first = [*install, "--pre", *found_in]
            check_pre_release(first, given)
            subprocess.run([*first, "torch", "torchvision"], check=True, env=given)
        subprocess.run([*install, *names], check=True, env=given)
        print(f"== installed in {time.monotonic() - begun:.0f} s", flush=True)
        yield environment


@contextmanager
def reused(venv: Path) -> Iterator[Environment]:
    """Use an environment that exists, and leave it.

    Raises:
        NotFoundError: if this project is not installed there: pytest would not know its options.
    """
    environment = Environment(venv.absolute(), ROOT)
    # Not in this folder, where an editable installation in another environment leaves its name.
    asked = [environment.python, "-c", _IS_INSTALLED]
    if subprocess.run(asked, check=False, cwd=venv).returncode:
        raise NotFoundError(
            f"this project is not installed there; run {environment.python} -m pip install -e "
            f"'{ROOT}[test]', or name a version of torch"
        )
    yield environment
