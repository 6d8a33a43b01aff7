"""Write a report file whole or not at all, and otherwise as ``open(path, "w")`` would.

A regular file is replaced by a complete new one with the same mode and owner. Anything that must
keep its identity is written in place: pipes and devices, files with several names (hard links),
and files whose owner cannot be given to a new one.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from io import FileIO
from pathlib import Path
from stat import S_IMODE, S_ISREG

from pytest_cka_memory.errors import ReportError

_LONGEST_PREFIX = 40
"""Characters of a file's name in the name of its temporary file, which must not become too long."""


def check_writable(path: Path) -> None:
    """Create the folder of `path` and try to write there, before any test has run.

    Raises:
        ReportError: if that fails. Its message names the path and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _status_of(path)
        if known is None:
            _try_to_create_beside(Path(os.path.realpath(path)))
        elif S_ISREG(known.st_mode):
            _try_to_open(path)
        elif path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error
    if known is not None and _is_own_output(known):
        raise ReportError(
            f"cannot write {path}: this process prints its own output to that file, and each would "
            "overwrite the other; write another file's path"
        )


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, so that readers find the old file or the new one, never a part.

    Files that must be written in place, as the module describes, are the exception.

    Raises:
        ReportError: if that fails. Its message names the path and the reason. An old file is kept.
    """
    # File names may hold any bytes, which reports escape.
    data = text.encode("utf-8", errors="backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known = _status_of(path)
        if known is None or _can_be_replaced(path, known):
            _replace(Path(os.path.realpath(path)), data, known)
        else:
            path.write_bytes(data)
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def append_line(path: Path, text: str) -> None:
    """Add a line to `path`, whole or not at all, also while another process adds one.

    If the last line there has no end, because its writer was killed, the new line begins on a line
    of its own.

    Raises:
        ReportError: if that fails. Its message names the path and reason. The file is unchanged.
    """
    data = text.encode("utf-8", errors="backslashreplace") + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file, _locked(file):
            size = file.seek(0, os.SEEK_END)
            if size and file.seek(size - 1) >= 0 and file.read(1) != b"\n":
                data = b"\n" + data
            try:
                if file.write(data) != len(data):
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(size)
                raise
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Keep other processes out that add a line too; on Windows a single write has to do."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with suppress(OSError):  # a network file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file ends the lock


def same_file(path: Path, other: Path) -> bool:
    """Whether what is written to one path would overwrite what is written to the other."""
    try:
        known, others = _status_of(path), _status_of(other)
        if known is not None and others is not None:
            return S_ISREG(known.st_mode) and os.path.samestat(known, others)
    except (OSError, ValueError):
        return False  # check_writable refuses such a path
    return os.path.realpath(path) == os.path.realpath(other)


def _status_of(path: Path) -> os.stat_result | None:
    """Return the status of the file that `path` leads to; None if it does not exist."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _refusal(path: Path, error: OSError | ValueError) -> ReportError:
    return ReportError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def _is_own_output(known: os.stat_result) -> bool:
    """Whether it is a regular file to which standard output or standard error is redirected."""
    if not S_ISREG(known.st_mode):
        return False  # the shell reads from a pipe what both write
    for descriptor in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(known, os.fstat(descriptor)):
                return True
    return False


def _can_be_replaced(path: Path, known: os.stat_result) -> bool:
    """Whether a new file may take the place of the existing one, without a loss for other names."""
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory")
    if not S_ISREG(known.st_mode) or known.st_nlink != 1:
        return False
    if not hasattr(os, "chown"):  # Windows
        return True
    _try_to_open(path)
    target = Path(os.path.realpath(path))  # does not exist if /dev/fd names a file without a name
    if not target.exists() or os.geteuid() not in (0, known.st_uid):
        return False
    try:
        _try_to_create_beside(target)
    except OSError:  # the file may be written, but its folder may not
        return False
    return True


def _replace(target: Path, data: bytes, known: os.stat_result | None) -> None:
    """Write a new file beside `target` and give it that name; `known` is what it replaces."""
    temporary = _temporary_beside(target)
    try:
        # Created like any new file: the user's umask and the folder's settings decide its mode.
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if known is not None:
            _keep_owner_and_mode(temporary, known)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)  # exists only if writing failed or was interrupted


def _keep_owner_and_mode(path: Path, known: os.stat_result) -> None:
    if hasattr(os, "chown"):
        with suppress(PermissionError):  # of a group that this user does not belong to
            os.chown(path, known.st_uid, known.st_gid)
    path.chmod(S_IMODE(known.st_mode))  # last, because a change of owner may drop bits of the mode


def _try_to_open(path: Path) -> None:
    """Raise an error if the existing file or its file system is read-only."""
    os.close(os.open(path, os.O_WRONLY))


def _try_to_create_beside(target: Path) -> None:
    temporary = _temporary_beside(target)
    temporary.touch(exist_ok=False)
    temporary.unlink()


def _temporary_beside(target: Path) -> Path:
    return target.with_name(f".{target.name[:_LONGEST_PREFIX]}.{secrets.token_hex(4)}")
