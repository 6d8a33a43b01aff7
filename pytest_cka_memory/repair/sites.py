"""Where the user's files contain the expression that is being evaluated."""

import os
import sys
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType

from pytest_cka_memory.core.libraries import is_foreign, is_installed


@dataclass(frozen=True)
class Site:
    """An expression in a file. Columns are bytes of UTF-8, from 0, as Python counts them."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str
    """The name of the function that contains it."""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


def is_users(file: str) -> bool:
    """Whether a file exists and the user may edit it: it is not part of an installed package."""
    return not is_foreign(file) and not is_installed(file) and os.path.isfile(file)


def calling_site(made: object = None) -> Site | None:
    """Return the innermost expression of the user's files that led here; None if there is none.

    Args:
        made: an object whose ``__init__`` is running: the site is then where it is created.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not _initializes(frame, made):
            return site_of(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


def calls_directly(depth: int) -> bool:
    """Whether the function `depth` frames further out belongs to a file of the user."""
    return is_users(sys._getframe(depth + 1).f_code.co_filename)


def _initializes(frame: FrameType, made: object) -> bool:
    code = frame.f_code
    if made is None or code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


def site_of(code: CodeType, last: int) -> Site | None:
    """Return the expression of an instruction; None if Python does not know its columns."""
    positions = getattr(code, "co_positions", None)  # since Python 3.11
    if positions is None:
        return None
    line, end_line, column, end_column = next(islice(positions(), last // 2, None))
    if None in (line, end_line, column, end_column):
        return None
    return Site(code.co_filename, line, column, end_line, end_column, code.co_name)
