"""What the readers of all stored files check alike: the bytes, conflict marks and the schema."""

import re
from pathlib import Path

from pytest_cka_memory.errors import BaselineError, ReportError

# A mark ends its line, or white space follows it: such as the "\r" of a file with "\r\n".
_CONFLICT = re.compile(r"^[ \t]*(?:<{7}|={7}|>{7}|\|{7})(?:[^\S\n].*)?$", re.MULTILINE)


def bytes_of(path: Path, error: type[BaselineError] | type[ReportError]) -> bytes:
    """Return the bytes of a file.

    Args:
        path: of the file; a folder, a pipe and the like are refused, because to read one may block.
        error: what to raise.

    Raises:
        BaselineError, ReportError: whichever `error` is, naming the file.
    """
    try:
        if path.exists() and not path.is_file():
            raise error(f"cannot use {path}: not a regular file")
        return path.read_bytes()
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None


def line_at(content: bytes | str, position: int) -> int:
    """Return the number, from 1, of the line in which a position of a file is."""
    before = content[:position]
    return 1 + (before.count(b"\n") if isinstance(before, bytes) else before.count("\n"))


def conflict_in(content: str) -> tuple[int, str] | None:
    """Return the line of the first mark of an unresolved merge conflict, and its text."""
    mark = _CONFLICT.search(content)
    return None if mark is None else (line_at(content, mark.start()), mark[0].strip()[:40].strip())


def is_other_version(schema: object, own: str) -> bool:
    """Whether a schema is `own` with another number: another version of the plugin wrote it."""
    name, _, _ = own.rpartition("/")
    numbered = rf"{re.escape(name)}/[1-9][0-9]{{0,8}}"
    return isinstance(schema, str) and bool(re.fullmatch(numbered, schema))
