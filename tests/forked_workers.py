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

    header, streams, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 3)
    with connection.makefile("rb") as file:
        asked = json.loads(file.read(int.from_bytes(header, "big")))
    child = os.fork()
    if child == 0:
        connection.close()
        _become(asked, streams)
    for stream in streams:
        os.close(stream)

    def end_with_the_other() -> None:
        with contextlib.suppress(ProcessLookupError):
            while connection.recv(1):
                os.kill(child, signal.SIGTERM)
            os.kill(child, signal.SIGKILL)

    threading.Thread(target=end_with_the_other, daemon=True).start()
    _, status = os.waitpid(child, 0)
    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(asked: dict, streams: list[int]) -> None:  # type: ignore[type-arg]
    """Run the arguments of Python in this process, and end it."""
    import atexit
    import threading
    import traceback

    import forked_processes

    atexit._clear()  # what the server would do at its end
    status = 1
    try:
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has replaced it
        # Those of the server take a pipe for the file that it writes to.
        for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
            stream = open(  # noqa: SIM115
                number, "w", 1, encoding=sys.stdout.encoding, errors=errors, closefd=False
            )
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        words = ["python", *[word for word in asked["arguments"] if word != "-u"]]
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


def _ask(arguments: list[str]) -> int:
    """Ask the server for a process and pass SIGTERM on to it; end by a signal if it does.

    Returns the status with which it ends otherwise.
    """
    import signal

    environment = dict(os.environ)
    asked = {
        "arguments": arguments,
        "folder": os.getcwd(),
        "environment": environment,
    }
    body = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(environment.pop(SOCKET))
        socket.send_fds(connection, [len(body).to_bytes(_LENGTH_BYTES, "big")], [0, 1, 2])
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
