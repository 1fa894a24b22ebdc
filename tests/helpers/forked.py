"""Runs Python programs in processes forked off a server that has imported the project: a start takes 0.1 s, not 5 s.

The server runs no other thread, which makes forking safe. Programs see their own arguments, environment, folder and
output as a fresh interpreter would; what a program does while it imports the project is not tested this way.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any

from roomy import call_with_room

REPOSITORY = Path(__file__).resolve().parents[2]


def forkserver() -> ForkServerContext:
    """Return the context whose processes have imported the project."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    python_path = os.environ.get("PYTHONPATH")
    # Python 3.11 does not tell the server where to find the modules, and says nothing where it does not find them.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    _forkserver.ensure_running()
    if python_path is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = python_path
    return context


def server_for_others() -> str:
    """Start the server; its address, for ``use_server`` in other processes. It says nothing and ends with this one."""
    errors, silent = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)
    forkserver()
    os.dup2(errors, 2)
    os.close(errors)
    os.close(silent)
    return _forkserver._forkserver_address


def serve_from_here() -> None:
    """Fork the server off this process, which has imported what the programs need and runs no other thread."""
    address, alive = multiprocessing.connection.arbitrary_address("AF_UNIX"), os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if os.fork() == 0:
            os.close(alive[1])
            try:
                multiprocessing.forkserver.main(listener.fileno(), alive[0], [])
            finally:
                os._exit(0)
    os.close(alive[0])
    _forkserver._forkserver_alive_fd = alive[1]
    use_server(address)


def use_server(address: str) -> None:
    """Let another process's server fork what this process starts."""
    _forkserver._forkserver_address, _forkserver.ensure_running = address, lambda: None
    if _forkserver._forkserver_alive_fd is None:
        # Each request names the pipe that says whether who asked still lives.
        _forkserver._forkserver_alive_fd = os.pipe()[1]


def use_errors_of_parent() -> None:
    """Let this process write its errors where the one does that has asked for it, not where its server does."""
    with contextlib.suppress(OSError):
        errors = os.open(f"/proc/{multiprocessing.parent_process().pid}/fd/2", os.O_WRONLY | os.O_APPEND)
        os.dup2(errors, 2)
        os.close(errors)


class Program:
    """A program that runs in a forked process."""

    def __init__(
        self,
        arguments: Sequence[object],
        cwd: str | Path = REPOSITORY,
        env: Mapping[str, str] | None = None,
        largest_file: int | None = None,
    ) -> None:
        """Start ``python ARGUMENTS`` with a script or ``-m MODULE``.

        Args:
            env: the whole environment; by default that of this process. The import path follows its PYTHONPATH.
            largest_file: bytes beyond which no file may grow, as on a full disk.
        """
        self.command = [str(argument) for argument in arguments]
        environment = dict(os.environ if env is None else env)
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [os.path.join(self._folder.name, name) for name in ("stdout", "stderr")]
        context = forkserver()
        # What it forks comes from the same server.
        settings = (environment, str(cwd), self._outputs, largest_file, _forkserver._forkserver_address)
        self._process = context.Process(target=_run, args=(self.command, *settings))
        self._process.start()
        self.pid = self._process.pid

    def stdout(self) -> str:
        """What it has printed until now."""
        return self._read(self._outputs[0])

    def stderr(self) -> str:
        return self._read(self._outputs[1])

    def has_ended(self) -> bool:
        return not self._process.is_alive()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until something holds; AssertionError if the program ends before."""
        while not condition():
            assert not self.has_ended(), self.stdout() + self.stderr()
            time.sleep(0.02)

    def wait(self, timeout: float = 600.0) -> CompletedProcess[str]:
        """Its status, negative for a signal, and output; it is killed if it runs on for ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
            raise TimeoutExpired(self.command, timeout)
        with self._folder:
            return CompletedProcess(self.command, self._process.exitcode, self.stdout(), self.stderr())

    @staticmethod
    def _read(path: str) -> str:
        return Path(path).read_text() if os.path.exists(path) else ""


def run_python(
    arguments: Sequence[object],
    cwd: str | Path = REPOSITORY,
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    largest_file: int | None = None,
) -> CompletedProcess[str]:
    """Run a ``Program`` to its end, and return its status and output."""
    return Program(arguments, cwd, env, largest_file).wait(timeout)


def rank_variables(count: int) -> list[dict[str, str]]:
    """What torchrun adds to the environment of each of ``count`` processes."""
    with socket.socket() as port_socket:
        port_socket.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port_socket.getsockname()[1])}
    common |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def start_ranks(arguments: Sequence[object], count: int, cwd: str | Path = REPOSITORY) -> list[Program]:
    """Start a program in as many processes, with the environment that torchrun gives to each."""
    return [Program(arguments, cwd, os.environ | variables) for variables in rank_variables(count)]


def run_ranks(arguments: Sequence[object], count: int, cwd: str | Path = REPOSITORY) -> list[CompletedProcess[str]]:
    """Run ``start_ranks`` to their end."""
    return [program.wait() for program in start_ranks(arguments, count, cwd)]


def run_line(address: str, line: str) -> int:
    """Run a line of Python in a process of the server with this address, with this process's streams; its status."""
    use_server(address)
    streams = [multiprocessing.reduction.DupFd(descriptor) for descriptor in range(3)]
    process = multiprocessing.get_context("forkserver").Process(target=_run_line, args=(address, line, streams))
    process.start()
    process.join()
    return process.exitcode


def _run_line(address: str, line: str, streams: list[Any]) -> None:
    for descriptor, stream in enumerate(streams):
        os.dup2(stream.detach(), descriptor)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (it stays open)
    use_server(address)
    # pytest imports it in its own way; to what other modules have taken from it, this is the process that runs tests.
    if imported := sys.modules.pop("conftest", None):
        imported._PROCESS = os.getpid()
    exec(line, {"__name__": "__main__"})
    atexit._run_exitfuncs()


def _run(
    command: list[str], env: dict[str, str], cwd: str, outputs: list[str], largest_file: int | None, server: str
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if largest_file is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    use_server(server)
    status = call_with_room(_status_of, command)
    # What the interpreter does at its end; a forked process would leave it out.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status_of(command: list[str]) -> int:
    """Run the program and return the status with which its interpreter would end."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path.insert(0, os.getcwd())
            # The server may have imported the module, of which runpy would warn.
            sys.modules.pop(command[1], None)
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, os.path.dirname(os.path.abspath(command[0])))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":  # run in place of an interpreter: ADDRESS -u -c LINE
    import forked

    sys.exit(forked.run_line(sys.argv[1], sys.argv[-1]))
