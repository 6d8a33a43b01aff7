"""Imports point one way: each module imports only from those listed above it."""

import ast
import re
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

LAYERS = {
    "pytest_cka_memory": """
        _version names errors timeline births loaders roots workers ranks sigterm actions
        units references tolerance
        region baseline_file
        meters.base meters.private meters.interrupts meters.generations meters.storages
        meters.history meters.ledger meters.tracing meters.watch meters.peaks
        meters.passes
        meters.caching meters.expandable meters.cards meters.workspaces meters.heap
        meters.replay meters.unpredictable meters.fake_mode meters.guard meters.faking
        meters.predicted
        meters.cpu meters.accelerator meters
        hidden paths
        holders limits results extensions baselines baseline_limit comparing
        gauge testing hookspecs options settings session open_region
        reports reports.escapes reports.terminal reports.failure reports.files reports.json_file
        reports.properties reports.summary reports.markdown reports.html reports.comparison
        reports.shapes reports.reading reports.github
        probe notebook items
        __init__
        baseline_output github_output outputs reporting rank_reporting
        measuring starting
        plugin cli __main__
    """,
    "cka": """
        errors
        functional functional.precision functional.native functional.sums functional.hsic
        functional.kernels functional.features
        capture capture.layers capture.outputs capture.hooks
        data data.batches data.loaders
        running running.placement running.distributed running.estimators running.rows
        running.model_runner running.run
        plots result progress comparison
        __init__
    """,
}
"""Add a new module where its imports allow; if none fits, it closes a circle."""


def modules_of(package: str) -> dict[str, Path]:
    """Name -> file of every module, as the list above names it."""
    spec = find_spec(package)  # as installed: CI tests the wheel, not the checkout
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    found = {}
    for file in sorted(folder.rglob("*.py")):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


def imports_of(file: Path) -> Iterator[str]:
    """Everything a file imports, anywhere in it: lazily and for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner_imports(package: str, file: Path) -> Iterator[str]:
    """The modules of its own package that a file imports."""
    known = modules_of(package)
    for name in imports_of(file):
        if name.split(".")[0] != package:
            continue
        path = name.split(".")[1:]
        candidates = (".".join(path[:length]) for length in range(len(path), 0, -1))
        yield next((candidate for candidate in candidates if candidate in known), "__init__")


@pytest.mark.parametrize("package", LAYERS)
def test_every_module_has_its_layer(package: str) -> None:
    """One that is not listed could import anything."""
    assert sorted(LAYERS[package].split()) == sorted(modules_of(package))


@pytest.mark.parametrize("package", LAYERS)
def test_imports_point_one_way(package: str) -> None:
    """So there is no circle, and a module can be read with only those above it known."""
    order = LAYERS[package].split()
    wrong = [
        f"{name} imports {imported}"
        for name, file in modules_of(package).items()
        for imported in inner_imports(package, file)
        if imported != name and order.index(imported) > order.index(name)
    ]
    assert wrong == []


def test_nothing_imports_the_plugin() -> None:
    """It wires hooks; pytest alone loads it."""
    importers = [
        name
        for name, file in modules_of("pytest_cka_memory").items()
        if "plugin" in inner_imports("pytest_cka_memory", file)
    ]
    assert importers == []


@pytest.mark.parametrize(
    ("package", "other"), [("cka", "pytest_cka_memory"), ("pytest_cka_memory", "cka")]
)
def test_the_two_packages_never_import_each_other(package: str, other: str) -> None:
    """They meet in the tests."""
    imported = {
        name.split(".")[0] for file in modules_of(package).values() for name in imports_of(file)
    }
    assert other not in imported


def test_only_meters_ask_a_device() -> None:
    """Everything above them works from numbers, and is tested with scripted ones."""
    devices = {"cuda", "accelerator", "xpu", "mps"}
    asking = [
        f"{name}:{node.lineno}"
        for name, file in modules_of("pytest_cka_memory").items()
        if not name.startswith("meters")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in devices
    ]
    assert asking == []


PRIVATE_HOMES = {"pytest_cka_memory": "meters.private", "cka": "running.placement"}
"""The one module of each package that may use private names of torch, and stands without them."""
NOT_TORCHS = {
    "_asdict": "named tuples'",
    "_fields": "named tuples'",
    "_current_frames": "Python's",
    "_getframe": "Python's",
    "_lru_cache_wrapper": "Python's",
    "_tw": "pytest's",
    "_close": "our regions'",
    "_version": "torch's, but its manual explains it (torch.autograd.graph.increment_version)",
}
"""Names that begin with an underscore and may be asked of other objects."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(source: str, strings: Collection[str] = ()) -> Iterator[str]:
    """Private names that code uses of others: in imports, as attributes, and in strings.

    Of strings, those that are a dotted name of torch's, or one of `strings`.
    """
    for node in ast.walk(ast.parse(source)):
        used: list[str] = []
        if isinstance(node, ast.Import):
            used = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            used = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            used = [] if own or node.attr in NOT_TORCHS else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"torch(\.\w+)+", node.value):
                used = node.value.split(".")
            elif node.value in strings:
                used = [node.value]
        yield from filter(is_private, used)


@pytest.mark.parametrize("package", PRIVATE_HOMES)
def test_private_names_of_torch_are_used_in_one_module(package: str) -> None:
    """There each is looked up once and can be missed: `tests/memory/test_private_names.py`."""
    sources = {name: file.read_text("utf-8") for name, file in modules_of(package).items()}
    home = sources.pop(PRIVATE_HOMES[package])
    words = {
        word
        for node in ast.walk(ast.parse(home))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in node.value.split(".")
        if word.isidentifier() and is_private(word)
    }
    known = words | set(private_names(home))
    assert known
    used = {name: sorted(private_names(source, known)) for name, source in sources.items()}
    assert {name: found for name, found in used.items() if found} == {}


@pytest.mark.parametrize(
    "source",
    [
        "torch._C.is_there()",
        "import torch._dynamo",
        "from torch._subclasses import fake_tensor",
        "from torch.utils import _python_dispatch",
        "from torch import _C as core",
        "torch.utils._mode_utils",
        "storage._cdata",
        "tensor.untyped_storage()._weak_ref()",
        "getattr(tensor, '_is_view')",
        "hasattr(torch, '_C')",
        "resolve_name('torch._C.DisableTorchFunction')",
    ],
)
def test_a_private_name_does_not_go_unseen(source: str) -> None:
    """However it is reached."""
    assert list(private_names(source, {"_is_view", "_C"}))


@pytest.mark.parametrize(
    "source",
    [
        "self._torch",
        "super()._close()",
        "cls._known",
        "tensor.__dict__",
        "sys._getframe(1)",
        "from pytest_cka_memory._version import __version__",
        "'a view of ``torch._C``'",
        "'_mb'",
    ],
)
def test_what_is_private_to_others_is_let_be(source: str) -> None:
    """Else the test above would tell of what is no risk."""
    assert list(private_names(source, {"_is_view"})) == []
