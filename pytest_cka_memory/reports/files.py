"""Write a report file whole or not at all."""

import os
import tempfile
from pathlib import Path

from pytest_cka_memory.errors import ReportError


def check_writable(path: Path) -> None:
    """Make the folder of `path` and try to write there, before any test has run.

    Raises:
        ReportError: naming the path and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_stream(path):
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error


def _is_stream(path: Path) -> bool:
    """Whether `path` is there and is no file: to replace ``/dev/null`` by one would be a pity."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, so that readers find the old file or the new one, never a part.

    Raises:
        ReportError: naming the path and the reason; an old file is untouched.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_stream(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        target = path.resolve()  # a link stays, what it points to is replaced
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",  # file names may hold any bytes; JSON reads it back
            dir=target.parent,
            prefix=f".{path.name}.",
            delete=False,
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # a temporary file starts private
        temporary.replace(target)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # still there only if it failed, Ctrl-C included
