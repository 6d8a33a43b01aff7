"""Workers of inner sessions, forked from a process that has imported torch already.

pytest-xdist starts a new interpreter for each worker, and importing torch there takes longer than
most tests. `ForkedWorkers` makes it run this file instead: it asks a server for a fork that gets
its arguments, environment and streams, and lasts as long as that process. Run as a script, this
file needs nothing else and imports little.
"""

import json
import os
import socket
import sys

SOCKET = "FORKED_WORKERS_SOCKET"
PYTHON = f"{sys.executable} -S -E {__file__}"
"""The command of a program that takes the arguments of Python, and is forked."""
_LENGTH_BYTES = 8
_MOST_FILES = 64  # that a process passes on
_MOST_NUMBER = 1024


class ForkedWorkers:
    """A plugin for inner sessions: their workers are forked from the server at an address."""

    def __init__(self, address: str) -> None:
        """Take the address of a socket on which `serve` listens."""
        self._address = address

    def pytest_xdist_setupnodes(self, specs: list) -> None:  # type: ignore[type-arg]
        """Replace the interpreter of each worker that would be started on this machine."""
        import execnet

        os.environ[SOCKET] = self._address
        for index, spec in enumerate(specs):
            if spec.popen and not spec.python:
                specs[index] = execnet.XSpec(f"{spec}//id={spec.id}//python={PYTHON}")


def serve(listener: socket.socket) -> None:
    """Fork a process for each connection, until this process is ended."""
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process is left as a zombie
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _accompany(connection)
            os._exit(0)
        connection.close()


def _accompany(connection: socket.socket) -> None:
    """Run what the other end asks for; end it if that is ended, and send it the exit status."""
    import contextlib
    import signal
    import threading

    header, files, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MOST_FILES)
    with connection.makefile("rb") as file:
        asked = json.loads(file.read(int.from_bytes(header, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(asked, files)
    for number in files:
        os.close(number)

    def end_with_the_other() -> None:
        with contextlib.suppress(ProcessLookupError):
            while connection.recv(1):
                os.kill(child, signal.SIGTERM)
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=end_with_the_other, daemon=True).start()
    _, status = os.waitpid(child, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _take_numbers(files: list[int], numbers: list[int]) -> None:
    """Give open files the numbers that they have in the process that asks."""
    import fcntl

    # Above all of them first, because a file may have the number that another one shall have.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(asked: dict, files: list[int]) -> None:  # type: ignore[type-arg]
    """Run the arguments of Python in this process, and end it."""
    import atexit
    import itertools
    import threading
    import traceback

    import forked_processes

    atexit._clear()  # what the server would do at its end
    status = 1
    try:
        _take_numbers(files, asked["numbers"])
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has replaced it
        # Those of the server take a pipe for the file that it writes to.
        for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
            stream = open(  # noqa: SIM115
                number, "w", 1, encoding=sys.stdout.encoding, errors=errors, closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        arguments = itertools.dropwhile(lambda word: word in ("-u", "-B"), asked["arguments"])
        words = ["python", *arguments]
        status = forked_processes.command(words, asked["folder"], asked["environment"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _ask(arguments: list[str]) -> int:
    """Ask the server for a process and pass SIGTERM on to it; end by a signal if it does.

    Returns the status with which it ends otherwise.
    """
    import signal

    environment = dict(os.environ)
    # The streams, and the pipes by which `multiprocessing` says what a process shall run.
    numbers = [number for number in range(_MOST_NUMBER) if _is_open(number)][:_MOST_FILES]
    asked = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": environment,
        "numbers": numbers,
    }
    body = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(environment.pop(SOCKET))
        socket.send_fds(connection, [len(body).to_bytes(_LENGTH_BYTES, "big")], numbers)
        connection.sendall(body)
        signal.signal(signal.SIGTERM, lambda *_: connection.sendall(b"T"))
        status = int(connection.recv(16) or b"1")
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1:]))
