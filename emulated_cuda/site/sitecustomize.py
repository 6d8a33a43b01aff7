"""Gives this process the emulated CUDA device of the one that started it.

Python imports a module of this name when it starts. It is first on PYTHONPATH of processes that
``emulated_cuda`` prepared, and then runs the module of the same name that would have run without.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _load() -> None:
    from emulated_cuda.loading.loaded import load, loaded  # most processes do not import torch

    arguments = loading.arguments_of(os.environ)
    if arguments and loaded() is None:
        load(**arguments)


try:
    from emulated_cuda import loading
except ImportError:  # an interpreter of another environment, which has no such package
    pass
else:
    loading.load_before_torch(_load)


def _run_next() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path) != here]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_run_next()
