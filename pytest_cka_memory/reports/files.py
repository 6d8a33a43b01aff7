"""Write a report file whole or not at all."""

import os
import tempfile
from pathlib import Path

from pytest_cka_memory.errors import ReportError


def check_writable(path: Path) -> None:
    """Create the folder of `path` and try to write there, before any test has run.

    Raises:
        ReportError: if that fails; names the path and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_stream(path):
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error


def _is_stream(path: Path) -> bool:
    """Whether `path` is a device or a pipe, such as ``/dev/null``, which must not be replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, so that readers find the old file or the new one, never a part.

    Raises:
        ReportError: if that fails; names the path and the reason. An old file is unchanged.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_stream(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        target = path.resolve()  # replace what a link points to, not the link
        with tempfile.NamedTemporaryFile(
            "w",
            encoding="utf-8",
            errors="backslashreplace",  # file names may hold any bytes
            dir=target.parent,
            prefix=f".{path.name}.",
            delete=False,
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # temporary files are created readable by their owner only
        temporary.replace(target)
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # exists only if writing failed or was interrupted
