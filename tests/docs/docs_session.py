"""Follow a page as a reader would: write its files, run its commands, compare what they print.

The notes of blocks:

- ``file: NAME`` writes the block to this file of the page's folder;
- ``fails`` on a shell block: its last command ends with status 1;
- ``not run: WHY`` on a shell block: its commands are only checked (``test_commands_not_run.py``);
- ``output`` on a text block: what the last command printed; ``output: TITLE`` only the section of
  pytest's output whose title begins so; ``output, last line`` only that; ``output, torch 2.15`` is
  compared without its figures with other versions of torch, whose workspaces have other sizes,
  and without the workspaces themselves if only one of the two keeps them between products;
- ``drawn: NAME`` on a text block, ``checked by: TEST`` on any: another test compares it.

`NOTES` in ``test_blocks.py`` says which notes a block may have.

A Python block without a note is run as a script, a shell block without a note is run: ``pytest``,
``python``, ``mkdir``, ``cd``, and ``git`` as a user who has not configured it.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import NamedTuple

from docs_pages import Block, commands
from forked_processes import run

_TITLE = re.compile(r"^[=_]{3,} (.+?) [=_]{3,}$")
_MACHINE = re.compile(r"^(device: \w+) \(.*$", re.MULTILINE)
"""The line of a report that names the processor and the version of torch."""
_FIGURE = re.compile(r"\d[\d,.]*")
_SECONDS = re.compile(r"\d[\d,.]* s\b")
"""When something happened in a recording."""
_WORKSPACES = re.compile(
    r",?\s+workspaces (?:< )?\d+ %(?=,|$)|^in use at the end:.*\n(?:  .*\n)*", re.MULTILINE
)
"""What a kept workspace of cuBLAS makes of a message: a kind, and what is in use at the end."""
_DROPS_WORKSPACES = (2, 15)
"""The torch from which cuBLAS's workspace is freed after each product."""
_WRITTEN_BY = re.compile(r" \(its events [^)]*\)")
"""By what a recording shows which torch wrote it."""
_SITE = re.compile(r" in (?:[\w<>]+\.)*([\w<>]+): `[^`]*`")
"""A function without its class, and the expression in it that allocated."""
_REBUILT = re.compile(r" by `[^`]*` at ")
"""The expression that computes the next value of a variable."""
_INPUTS = re.compile(r"\binputs(?=,| \d| made)")
"""What a factory function of torch has made, which is told by the expression."""
_LINE_OF_LAW = re.compile(r"(\.py:\d+ in \w+): [^`].*")
"""A line of a law, and the expression in it that allocated."""
_PEAK = re.compile(r"^  at the peak.*?(?=^  what to do|^\S|\Z)", re.DOTALL | re.MULTILINE)
"""What was live at a peak: in groups of equal expressions, whose kinds follow from them."""
_KNOWS_EXPRESSIONS = hasattr(CodeType, "co_positions")
"""Whether Python knows which part of a line ran, and the classes of functions: from 3.11 on."""


class Shown(NamedTuple):
    """A text block and what was printed in its place."""

    block: Block
    printed: str

    @property
    def same(self) -> bool:
        """Whether the page shows what was printed, whatever machine it was printed on."""
        drawn_with = self.block.note.partition(", torch ")[2]
        ignored, kept = (_MACHINE, r"\1")
        if drawn_with and not version("torch").startswith(f"{drawn_with}."):
            ignored, kept = (_FIGURE, "#")
        texts = [self.block.text, self.printed]
        if not _KNOWS_EXPRESSIONS:
            texts = [_PEAK.sub("", text) for text in texts]
        if drawn_with and _keeps_workspaces(drawn_with) != _keeps_workspaces(version("torch")):
            texts = [_WORKSPACES.sub("", text) for text in texts]
        texts = [ignored.sub(kept, text) for text in texts]
        if ignored is _FIGURE:
            # Lines and lists are sorted by figures, and up to 2.10 a variable has another name.
            texts = [
                text.replace("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF") for text in texts
            ]
            texts = [text.replace("# blocks", "# block") for text in texts]
            texts = [_WRITTEN_BY.sub("", text) for text in texts]
            # And which of two changes that save nearly as much is left out depends on the version.
            texts = ["\n".join(sorted(set(map(_sorted, text.splitlines())))) for text in texts]
        texts = [_SECONDS.sub("# s", text) for text in texts]
        if not _KNOWS_EXPRESSIONS:  # then the whole line is printed, and wrapped at other words
            texts = [_LINE_OF_LAW.sub(r"\1", text) for text in texts]
            texts = [_SITE.sub(r" in \1", " ".join(text.split())) for text in texts]
            texts = [_INPUTS.sub("other", _REBUILT.sub(" ", text)) for text in texts]
        return texts[0] == texts[1]


def _sorted(line: str) -> str:
    return ", ".join(sorted(" ".join(line.split()).split(", ")))


def _keeps_workspaces(torch: str) -> bool:
    return tuple(map(int, torch.split(".")[:2])) < _DROPS_WORKSPACES


class Session:
    """A fresh folder, the current one, in which the blocks of one page are used in order."""

    def __init__(self) -> None:
        self._printed = ""
        self._home = os.getcwd()

    def follow(self, page: Iterable[Block]) -> Iterator[Shown]:
        """Use every block; yields each text block that shows an output."""
        for block in page:
            kind, _, argument = block.note.partition(", torch ")[0].partition(": ")
            if kind == "file":
                file = Path(argument)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, "utf-8")
            elif block.language == "sh" and kind in ("", "fails"):
                self._run_all(block, expected=1 if kind == "fails" else 0)
            elif block.language == "text" and kind == "output":
                yield Shown(block, _section(self._printed, argument))
            elif block.language == "text" and kind == "output, last line":
                yield Shown(block, self._printed.splitlines()[-1] + "\n")
            elif block.language == "python" and not kind:
                self._run_script(block)
            elif not is_checked_elsewhere(block):
                raise AssertionError(f"{block}: no test knows what to do with this block")

    def _run_all(self, block: Block, expected: int) -> None:
        *others, last = commands(block)
        for command in others:
            status, self._printed = self._run(command)
            assert status == 0, f"{block}: {command}\n{self._printed}"
        status, self._printed = self._run(last)
        assert status == expected, f"{block}: {last}\n{self._printed}"

    def _run(self, command: str) -> tuple[int, str]:
        words = shlex.split(command)
        if words[0] == "mkdir":
            Path(words[1]).mkdir()
            return 0, ""
        if words[0] == "cd":
            os.chdir(words[1])
            return 0, ""
        if words[0] == "git":
            return git(*words[1:])
        assert words[0] in ("pytest", "python"), f"no test can run this command: {command}"
        done = run(words, merged=True, with_children=True)
        return done.returncode, done.stdout.replace(self._home, "/home/you")

    def _run_script(self, block: Block) -> None:
        script = Path(f"block_{block.line}.py")
        script.write_text(block.text, "utf-8")
        done = run(["python", script.name], merged=True)
        self._printed = done.stdout
        assert done.returncode == 0, f"{block}\n{self._printed}"


def git(*words: str, folder: Path | None = None) -> tuple[int, str]:
    """Run git without any configuration of this machine or its user; status and output."""
    given = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    # Of a commit hook that runs the tests: they would name another repository.
    environment = {name: text for name, text in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *words],
        cwd=folder,
        env={**environment, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def is_checked_elsewhere(block: Block) -> bool:
    """Whether the block's note names what else checks it."""
    kind = block.note.partition(": ")[0]
    return kind in ("drawn", "checked by") or (block.language == "sh" and kind == "not run")


def _section(printed: str, title: str) -> str:
    """The part of pytest's output under the title that begins with `title`; all for no title."""
    if not title:
        return printed
    lines: list[str] = []
    inside = False
    for line in printed.splitlines():
        heading = _TITLE.match(line)
        if heading:
            if lines:
                break
            inside = heading[1].startswith(title)
        elif inside:
            lines.append(line.rstrip())
    assert lines, f"no section {title!r} in\n{printed}"
    return "\n".join(lines).strip("\n") + "\n"
