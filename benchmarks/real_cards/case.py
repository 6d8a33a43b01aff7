"""What a case of a real card is: figures that somebody published, and how to repeat them."""

import ast
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

CASES = Path(__file__).parent / "cases"
UNITS = {"bytes": 1, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}
KINDS = {
    "inference": "inference",
    "training": "training: mixed precision, checkpointing, adapters, optimizers, offload",
    "reserve": "reserve and fragmentation",
    "ranks": "several cards, figures of one rank",
    "compiled": "torch.compile and CUDA graphs",
    "vision": "vision",
    "operators": "single operators and layers",
    "programs": "the sources' own programs: levels at the end of a recording",
}


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    printed: str
    """As it was published: its digits say how exact it is."""
    unit: str
    """A key of :data:`UNITS`. It is the unit that was computed with, not always the one printed."""
    counts: str = "peak allocated"
    """What it counts: ``allocated``, ``peak allocated``, ``reserved``, ``peak reserved``."""
    kind: str = ""
    """A key of :data:`KINDS`; empty if it is the one of its case."""
    cause: str = ""
    """Why the emulated figure differs, if it does and the cause is known."""

    @property
    def published_bytes(self) -> float:
        """The figure in bytes."""
        return float(self.printed) * UNITS[self.unit]

    def is_equal(self, found_bytes: float) -> bool:
        """Return whether these bytes, printed as the figure is, have the same digits."""
        decimals = len(self.printed.partition(".")[2])
        shown = f"{found_bytes / UNITS[self.unit]:.{decimals}f}"
        return shown == self.printed

    def error(self, found_bytes: float) -> float:
        """Return by which share these bytes are above the figure."""
        return found_bytes / self.published_bytes - 1


@dataclass(frozen=True)
class Case:
    """Figures of one source, and under which conditions they were measured."""

    title: str
    source: str
    """Where the figures are published."""
    kind: str
    """A key of :data:`KINDS`."""
    card: str
    """The emulated card: the one of the source, or one of its generation."""
    real: str
    """The card and the versions of the source, as far as it names them."""
    torch: str
    """The version of torch in the source; it chooses the nearest that can be had."""
    figures: Mapping[str, Figure]
    runs: Sequence[str] = ("all",)
    """Names of the processes that measure them, one after another."""
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: int = 1
    memory: str = ""
    """Memory of the card, such as ``95GiB``; empty if it is the emulated card's."""
    needs: Sequence[str] = ()
    """Packages to install beside torch."""
    programs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The source's own program, if that runs as it is: of each repository its owner and name, ``@``
    and the commit, and which of its files and folders are needed."""
    takes: str = ""
    """Why all of its processes together take longer than ten minutes, if they do."""
    differs: str = ""
    """What this program does otherwise than the source's, and what of the rest is known."""
    rebuilt: str = ""
    """What of the program, or of its versions, the source does not say; empty if both are known."""
    seen: str = ""
    """Why no figure of this case is blind: how it was changed after a comparison."""


CUBLAS_BEFORE_2_7 = {
    "TORCH_CUBLAS_WORKSPACE_CACHE": "1",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0",
}
"""Torch before 2.7 kept a workspace of cuBLASLt beside the one of cuBLAS."""


CUBLAS_OF_BLACKWELL = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
"""Torch before 2.12 took this workspace on Blackwell; later versions take 32 MiB."""


def names() -> list[str]:
    """Return the names of all cases."""
    return sorted(file.stem for file in CASES.glob("*.py") if not file.stem.startswith("_"))


def module(name: str) -> ModuleType:
    """Import the file of a case; it has ``CASE`` and ``measured(run)``."""
    for folder in (str(CASES.parent), str(CASES)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


def load(name: str) -> Case:
    """Return the case of a file."""
    case: Case = module(name).CASE
    return case


def summary(name: str) -> str:
    """Return the first sentence of a case's file."""
    text = ast.get_docstring(ast.parse((CASES / f"{name}.py").read_text("utf-8"))) or ""
    return re.sub(r"\s+", " ", text.partition("\n\n")[0])
