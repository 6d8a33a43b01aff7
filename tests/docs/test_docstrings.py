"""The examples in the docstrings of public names run, and print what they show."""

import doctest
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest
from forked_processes import run

import cka
import emulated_cuda
import pytest_cka_memory

pytestmark = pytest.mark.usefixtures("imports_excluded_from_search")

WITH_EXAMPLES = {
    "CKA",
    "MemoryProbe",
    "MemoryProbe.run",
    "MemoryProbe.sweep",
    "cka_from_features",
    "compare_many",
    "hsic",
    "null_distribution",
}


def _examples(package: ModuleType) -> Iterator[doctest.DocTest]:
    """Yield the examples of a package's public names and their methods."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in package.__all__:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            module = inspect.getmodule(inspect.unwrap(value))
            yield from finder.find(inspect.unwrap(value), name, module)


EXAMPLES = [
    example
    for package in (cka, pytest_cka_memory)
    for example in _examples(package)
    if example.examples
]
ON_EMULATED_DEVICES = [example for example in _examples(emulated_cuda) if example.examples]


def test_names_that_users_begin_with_have_an_example():
    """A docstring from which users begin has an example; other names are on the reference pages."""
    assert {example.name for example in EXAMPLES} >= WITH_EXAMPLES


def _wrong_lines(example: doctest.DocTest) -> str:
    """Run an example and return how its output differs from what it shows."""
    printed: list[str] = []
    done = doctest.DocTestRunner(verbose=False).run(example, out=printed.append)
    assert done.attempted == len(example.examples)
    return "".join(printed)


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_example_prints_what_it_shows(example):
    """An example whose output differs from what its docstring shows fails here."""
    assert _wrong_lines(example) == ""


@pytest.mark.emulates
@pytest.mark.parametrize(
    "example", ON_EMULATED_DEVICES, ids=[example.name for example in ON_EMULATED_DEVICES]
)
def test_example_on_an_emulated_device_prints_what_it_shows(example, tmp_path):
    """Examples on an emulated device run in processes of their own, which have one device each."""
    (tmp_path / "example.txt").write_text(example.docstring, "utf-8")
    done = run(["python", "-m", "doctest", "example.txt"], folder=tmp_path, merged=True)
    assert (done.returncode, done.stdout) == (0, "")
