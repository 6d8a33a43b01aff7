"""The expression at an instruction, read from the source file."""

import linecache
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from pytest_cka_memory.core.allocations import expression_at

HAS_COLUMNS = hasattr(CodeType, "co_positions")
NEEDS_COLUMNS = pytest.mark.skipif(
    not HAS_COLUMNS, reason="Python 3.10 does not record the columns of instructions"
)


class Recorder:
    """Records the expression that its caller evaluates while an operator or method runs."""

    def __init__(self) -> None:
        self.seen: str | None = None

    def record(self, *_: Any) -> "Recorder":
        caller: FrameType | None = sys._getframe(1)
        assert caller is not None
        self.seen = expression_at(caller.f_code, caller.f_lasti)
        return self

    __call__ = __add__ = __mul__ = __getitem__ = __neg__ = record


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], str | None]:
    """Return a function that runs source code from a file, and returns what `x` recorded last."""

    def run(source: str, *, keep_file: bool = True) -> str | None:
        file = tmp_path / "program.py"
        file.write_text(source, encoding="utf-8")
        linecache.checkcache(str(file))
        code = compile(source, str(file), "exec")
        if not keep_file:
            file.unlink()
        recorder = Recorder()
        exec(code, {"x": recorder})
        return recorder.seen

    return run


@NEEDS_COLUMNS
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("y = [1, (x * 2)[0]]", "(x * 2)[0]", id="part-of-a-line"),
        pytest.param("y = x * 2, 3", "x * 2", id="operator"),
        pytest.param("y = x.record(1)", "x.record(1)", id="method"),
        pytest.param("é = 'ü€😀'; y = x + 'ß', 1", "x + 'ß'", id="not-ascii"),
        pytest.param(
            "y = x.record(\n    1,  # one\n    [2,\n     3],\n)\n",
            "x.record(1, [2, 3])",
            id="lines",
        ),
        pytest.param("y = ['é', x(\n  'é',\n  'ü'), 'ß']\n", "x('é', 'ü')", id="lines-not-ascii"),
        pytest.param("f = lambda y: y * 2 if y else 0\nf(x)", "y * 2", id="lambda"),
        pytest.param("y = [item * 2 for item in (x,)]", "item * 2", id="list-comprehension"),
        pytest.param("y = {n: -x for n in range(2)}", "-x", id="dict-comprehension"),
        pytest.param("y = sum(len(str(-n)) for n in (x,))", "-n", id="generator"),
        pytest.param("@x.record\ndef f(): pass\n", "x.record", id="decorator"),
        pytest.param("def f(y=x(1)):\n    return 1\n", "x(1)", id="default"),
        pytest.param("y = f'{x(1)} and {2}'", "x(1)", id="f-string"),
    ],
)
def test_the_expression_is_found(
    run: Callable[..., str | None], source: str, expected: str | None
) -> None:
    """An expression is found in a part of a line, over several
    lines, and beside wide characters.
    """
    assert run(source) == expected


@NEEDS_COLUMNS
def test_a_long_expression_loses_its_middle(run: Callable[..., str | None]) -> None:
    """A long expression loses its middle, keeps its start and end,
    and has at most 60 characters.
    """
    names = ", ".join(f"'name{number}'" for number in range(20))
    found = run(f"y = x.record({names}).record('the last call')")
    assert found == "x.record('name0', 'name1', 'name2', ' … ord('the last call')"
    assert len(found) <= 60


@NEEDS_COLUMNS
def test_lines_that_are_no_expression_are_joined(run: Callable[..., str | None]) -> None:
    """The lines of a call that makes a class, which is no expression, are joined."""
    source = "class Meta(type):\n    pass\nclass Made(metaclass=x):\n    # why\n    number = 1\n"
    assert run(source) == "class Made(metaclass=x): # why number = 1"


@NEEDS_COLUMNS
def test_a_literal_of_many_lines_is_not_parsed(run: Callable[..., str | None]) -> None:
    """A literal of many lines is not parsed, which takes long; its spaces and comma stay."""
    items = "".join(f"  {number},\n" for number in range(1000))
    assert (
        run(f"y = x([\n{items}])") == "x([ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, … 6, 997, 998, 999, ])"
    )


def test_without_columns_it_is_the_whole_line(tmp_path: Path) -> None:
    """Without columns, as in Python 3.10 or with ``-X
    no_debug_ranges``, the whole line is shown.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from pytest_cka_memory.core.allocations import expression_at\n"
        "def seen():\n"
        "    caller = sys._getframe(1)\n"
        "    return expression_at(caller.f_code, caller.f_lasti)\n"
        "if True:\n"
        "    found =  seen()  # here\n"
        "print(found)\n"
    )
    command = [sys.executable, "-X", "no_debug_ranges", str(program)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout == "found = seen() # here\n"


def test_there_is_none_if_the_file_is_missing(run: Callable[..., str | None]) -> None:
    """If a file is missing, as for removed or compiled code, there is no expression."""
    assert run("y = x * 2", keep_file=False) is None


def test_there_is_none_for_code_run_by_exec() -> None:
    """Code that is run by exec has no file with its source, so there is no expression."""
    recorder = Recorder()
    exec("y = x * 2", {"x": recorder})
    assert recorder.seen is None


def test_there_is_none_if_the_file_has_become_shorter(tmp_path: Path) -> None:
    """If a file has become shorter, the text at the old place would be another's: there is none."""
    file = tmp_path / "program.py"
    code = compile("\n\n\ny = x * 2", str(file), "exec")
    file.write_text("z = 1\n")
    recorder = Recorder()
    exec(code, {"x": recorder})
    assert recorder.seen is None


def test_every_instruction_of_a_module_has_a_text_or_none() -> None:
    """Every instruction of a module has a text or none, also the first, which has line 0."""
    source = Path(__file__).read_text(encoding="utf-8")
    code = compile(source, __file__, "exec")
    found = [expression_at(code, offset) for offset in range(-1, len(code.co_code) + 10)]
    assert any('hasattr(CodeType, "co_positions")' in str(text) for text in found)
    assert found[0] is not None
    assert all(text is None or 0 < len(text) <= 60 for text in found)
