"""Imports point one way: each level imports only from the levels below it."""

import ast
import re
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

PICTURES = {
    "pytest_cka_memory": """
        __main__
        cli
        plugin
        stored         integrations snapshots
        reports        notebook
        measure        testing      hookspecs
        holders        repair
        meters         limits
        laws
        core
        units
        errors         _version
    """,
    "emulated_cuda": """
        __main__
        running        site           smi           estimating     replaying
        loading
        activation
        triton
        values
        torch_private
        torch_versions cards          this_process   packing
        errors
    """,
    "cka": """
        many
        stored_comparison          gate
        stored
        comparison
        running
        result
        data                       plots                   result_file
        samples
        capture        functional  layer_ticks
        errors
    """,
}
"""The levels of each package, highest first: a unit may import from lower levels only.

A unit is a folder or a module at the top of the package. To add one, put it on the lowest level
that is above everything it imports. ``__init__`` has no level: it imports lazily or re-exports.
"""


@cache
def modules_of(package: str) -> dict[str, Path]:
    """Return module name -> file, without the name of the package itself."""
    spec = find_spec(package)  # as installed: CI tests the wheel, not the checkout
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    found = {}
    for file in sorted(folder.rglob("*.py")):
        name = ".".join(file.relative_to(folder).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = file
    return found


@cache
def imports_of(file: Path) -> list[tuple[int, str]]:
    """Return line and name of everything a file imports, also lazily and for type checkers."""
    return list(_imports_of(file))


def _imports_of(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def inner_imports(package: str, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and module of everything a file imports from its own package."""
    known = modules_of(package)
    for line, name in imports_of(file):
        if name.split(".")[0] != package:
            continue
        path = name.split(".")[1:]
        candidates = (".".join(path[:length]) for length in range(len(path), 0, -1))
        yield line, next((candidate for candidate in candidates if candidate in known), "__init__")


def levels_of(package: str) -> dict[str, int]:
    """Return unit -> level, 0 for the lowest."""
    lines = [line.split() for line in PICTURES[package].splitlines() if line.strip()]
    return {unit: level for level, units in enumerate(reversed(lines)) for unit in units}


def unit_of(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("package", PICTURES)
def test_every_unit_has_a_level(package: str) -> None:
    """A unit without a level could import anything."""
    units = {unit_of(module) for module in modules_of(package)} - {"__init__"}
    assert units == set(levels_of(package)), "add or remove these in PICTURES, at the top"


@pytest.mark.parametrize("package", PICTURES)
def test_imports_point_to_lower_levels(package: str) -> None:
    """Units import only lower ones, so each can be read with those
    below it, and no cycle exists.
    """
    levels = levels_of(package)
    wrong = [
        f"{package}.{name}, line {line}, imports {imported}, but {unit_of(imported)!r} is not "
        f"below {unit_of(name)!r}: move what both need to a lower level, or pass it as an argument"
        for name, file in modules_of(package).items()
        for line, imported in inner_imports(package, file)
        if "__init__" not in (name, imported)
        and unit_of(imported) != unit_of(name)
        and levels[unit_of(imported)] >= levels[unit_of(name)]
    ]
    assert wrong == []


@pytest.mark.parametrize("package", PICTURES)
def test_modules_of_one_folder_have_no_import_cycle(package: str) -> None:
    """No modules of a folder import each other in a cycle, nor do
    its folders, such as the meters.
    """
    modules = modules_of(package)
    folders = {"", *(name.rpartition(".")[0] for name in modules if "." in name)}
    for folder in sorted(folders):
        graph: dict[str, set[str]] = {}
        for name, file in modules.items():
            member = _member(name, folder)
            imported = {_member(other, folder) for _, other in inner_imports(package, file)}
            if member is not None:
                graph.setdefault(member, set()).update(
                    other for other in imported if other not in (None, member)
                )
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"{package}/{folder}: {' -> '.join(error.args[1])}; break this cycle")


@pytest.mark.parametrize("package", PICTURES)
def test_packages_and_modules_have_no_import_cycle(package: str) -> None:
    """The ``__init__`` of a folder may have what its modules need, and
    then imports none of those.
    """
    graph = {
        name: {other for _, other in inner_imports(package, file)} - {name, "__init__"}
        for name, file in modules_of(package).items()
        if name != "__init__"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"{package}: {' -> '.join(error.args[1])}; break this cycle")


def _member(module: str, folder: str) -> str | None:
    """Return the file or sub-folder of `folder` that has `module`; None for others."""
    if folder and not module.startswith(f"{folder}."):
        return None
    member = module[len(folder) + 1 if folder else 0 :].partition(".")[0]
    return None if member == "__init__" else member


def test_nothing_imports_the_entry_point() -> None:
    """The plugin's entry point is imported by pytest only."""
    importers = [
        name
        for name, file in modules_of("pytest_cka_memory").items()
        for _, imported in inner_imports("pytest_cka_memory", file)
        if imported == "plugin.entry_point"
    ]
    assert importers == []


def test_the_top_folder_has_few_modules() -> None:
    """The plugin's top folder has few modules, so its folders show what the plugin does."""
    top = [name for name in modules_of("pytest_cka_memory") if "." not in name]
    folders = {unit_of(name) for name in modules_of("pytest_cka_memory") if "." in name}
    assert len(set(top) - folders) <= 13


@pytest.mark.parametrize(
    ("package", "other"),
    [
        ("cka", "pytest_cka_memory"),
        ("cka", "emulated_cuda"),
        ("pytest_cka_memory", "cka"),
        ("emulated_cuda", "pytest_cka_memory"),
        ("emulated_cuda", "cka"),
        ("emulated_cuda", "pytest"),
    ],
)
def test_package_never_imports_the_other(package: str, other: str) -> None:
    """The plugin imports the emulated device; no other import crosses packages, except in tests."""
    imported = {
        name.split(".")[0] for file in modules_of(package).values() for _, name in imports_of(file)
    }
    assert other not in imported


def test_only_meters_ask_a_device() -> None:
    """Only meters ask a device; everything above them works with
    numbers and is tested with those.
    """
    devices = {"cuda", "accelerator", "xpu", "mps"}
    asking = [
        f"{name}:{node.lineno}"
        for name, file in modules_of("pytest_cka_memory").items()
        if unit_of(name) != "meters"
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in devices
    ]
    assert asking == []


PRIVATE_HOMES = {
    "pytest_cka_memory": ("meters.torch_private", "meters.torch_keepers"),
    "emulated_cuda": ("torch_private", "torch_versions"),
    "cka": ("running.placement",),
}
"""The modules that may use private names of torch, and work without them; one for each purpose."""
NOT_TORCHS = {
    "_asdict": "named tuples'",
    "_fields": "named tuples'",
    "_replace": "named tuples'",
    "_current_frames": "Python's",
    "_exit": "Python's",
    "_getframe": "Python's",
    "_lru_cache_wrapper": "Python's",
    "_close": "our regions'",
    "_explain_comparison": "our regions'",
    "_version": "torch's, but its manual explains it (torch.autograd.graph.increment_version)",
}
"""Names with a leading underscore that may be used on other objects."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(source: str, strings: Collection[str] = ()) -> Iterator[str]:
    """Yield private names that `source` uses: in imports, as attributes, and in strings.

    Strings count if they are a dotted name of torch, or one of `strings`.
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


@pytest.mark.slow
@pytest.mark.parametrize("package", PRIVATE_HOMES)
def test_private_names_of_torch_are_used_in_few_modules(package: str) -> None:
    """Private names of torch are looked up in few modules, where each of them may be missing."""
    sources = {name: file.read_text("utf-8") for name, file in modules_of(package).items()}
    homes = [sources.pop(home) for home in PRIVATE_HOMES[package]]
    words = {
        word
        for home in homes
        for node in ast.walk(ast.parse(home))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for word in node.value.split(".")
        if word.isidentifier() and is_private(word)
    }
    known = words | {name for home in homes for name in private_names(home)}
    assert known
    used = {name: sorted(private_names(source, known)) for name, source in sources.items()}
    assert {name: found for name, found in used.items() if found} == {}


OF_PYTEST = re.compile(r"_pytest(\.\w+)+|_unittest_|_xunit_|_obj|_instance|_tw")
"""Private names of pytest: those of its modules, of fixtures that it makes, and of its objects."""


def test_private_names_of_pytest_are_used_in_one_module() -> None:
    """A pytest version that renames a private name breaks only the
    module that uses private names.
    """
    users = set()
    for name, file in modules_of("pytest_cka_memory").items():
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [
                getattr(node, "module", None),
                getattr(node, "attr", None),
                getattr(node, "value", None),
            ]
            if any(isinstance(text, str) and OF_PYTEST.fullmatch(text) for text in names):
                users.add(name)
    assert users == {"plugin.pytest_private"}


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
def test_private_names_are_found(source: str) -> None:
    """A private name is found however the code reaches it."""
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
def test_private_names_of_others_are_accepted(source: str) -> None:
    """Private names that are not torch's are accepted, so that the
    check reports only real risks.
    """
    assert list(private_names(source, {"_is_view"})) == []
