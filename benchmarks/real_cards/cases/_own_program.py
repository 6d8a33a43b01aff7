"""Run a source's own script in this process, without the packages that only draw or log."""

import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

UNUSED = ("matplotlib", "matplotlib.pyplot", "wandb", "seaborn", "pandas", "regex")


def folder() -> Path:
    """Return the folder of the source's repository."""
    return Path(os.environ["REAL_CARDS_PROGRAM"])


def script(path: str, arguments: Sequence[str] = (), *, main: bool = False) -> dict[str, Any]:
    """Run a script from its own folder; return what it defines.

    Args:
        path: of the script, in the repository.
        arguments: of its command line.
        main: whether it is the main program, and not only imported.
    """
    missing = [name for name in UNUSED if "." not in name and not importlib.util.find_spec(name)]
    for name in UNUSED:
        if name.partition(".")[0] in missing:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    place = (folder() / path).parent
    os.chdir(place)
    sys.path.insert(0, str(place))
    sys.argv = [path, *arguments]
    return runpy.run_path(str(folder() / path), run_name="__main__" if main else "program")
