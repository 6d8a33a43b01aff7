"""The page with the table of hints; run this file to write it again after the table has changed."""

import difflib
import inspect
from collections.abc import Iterator
from pathlib import Path

import advice_of_graphs
import advice_of_holders
import advice_of_owners
import advice_of_peaks
import advice_of_reserves
from advice_table import CARD, COMMANDS, CPU, ELSEWHERE, ROWS, Program, Row

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "advice.md"
SECTIONS = {
    "Lists, hooks, caches, gradients, locals": advice_of_holders,
    "Autograd graphs and loops through C++": advice_of_graphs,
    "C++ code, compilers and libraries": advice_of_owners,
    "Peaks, garbage, processes": advice_of_peaks,
    "The allocator's reserve": advice_of_reserves,
}
START = """# Every hint, and the code that follows it

A broken limit is explained by what holds the memory, and by a line `what to do:` if something is
certain to help. Below is every such line that the plugin can print. Behind each is a program in
which it appears, and the lines that change when it is followed. The tests run both on the CPU and
on the [emulated device](../how-to/emulating.md), and the changed program must keep the limit that
the first one breaks. If nothing is certain to help, the line has a command that finds out more.

`KEEP` is a global list. `N` is the number of a line, and other names in backticks are those of the
program.
"""
NOTE = "<!-- checked by: tests/advice/test_followed_hints.py -->"


def page() -> str:
    """Return the text of the page."""
    return START + "".join(f"\n{line}\n" for line in lines())


def lines() -> Iterator[str]:
    for title, module in SECTIONS.items():
        yield f"## {title}"
        for row in ROWS:
            if inspect.getmodule(row.program) is module:
                yield from lines_about(row)
    yield "## Hints without a program here"
    reasons = {
        **dict.fromkeys(ELSEWHERE.values(), "its program has a session of its own"),
        **COMMANDS,
    }
    yield "\n".join(f"- {escaped(hint)} ({reason})" for hint, reason in reasons.items())


def lines_about(row: Row) -> Iterator[str]:
    only = {(CPU,): " (on the CPU)", (CARD,): " (on CUDA)"}.get(row.devices, "")
    yield f"### {row.name.replace('_', ' ').capitalize()}"
    yield f"> {escaped(row.hint)}{only}"
    limit = ", ".join(map(repr, row.limit.mark.args)).replace("'", '"')
    marker = f"@pytest.mark.{row.limit.mark.name}{f'({limit})' if limit else ''}"
    yield f"{NOTE}\n```python\n{marker}\n" + "\n".join(code_of(row.program)) + "\n```"
    for program in row.followed:
        yield f"{NOTE}\n```diff\n{changes(row.program, program)}\n```"


def code_of(program: Program) -> list[str]:
    code = inspect.getsource(program).splitlines()
    start = next(number for number, line in enumerate(code) if line.startswith("def "))
    return code[start:]


def changes(before: Program, after: Program) -> str:
    """Return the lines that differ, with the line around them."""
    found = difflib.unified_diff(code_of(before)[1:], code_of(after)[1:], n=1, lineterm="")
    return "\n".join("" if line.startswith("@@") else line for line in [*found][2:]).strip("\n")


def escaped(hint: str) -> str:
    """Return a hint as text of Markdown."""
    return "".join(f"\\{letter}" if letter in "*_<[" else letter for letter in hint)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
