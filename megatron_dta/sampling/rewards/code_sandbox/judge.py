"""The judge: has the tests, lets the runner start the program, and writes the verdict.

Tests that are code run here with references to what the program defines (``bridge.py``). Tests that are inputs and
outputs are compared here. The verdict is JSON: ``isolation``, ``passed``, ``stopped``, and ``error`` if a program did
not start.
"""

import ast
import builtins
import json
import os
import resource
import signal
import socket
import sys

import bridge
import kernel
from remote import Remote, remote_fields

# Names under which programs commonly import modules that tests then use.
_ALIASES = {"np": "numpy", "pd": "pandas"}
_KILLED = [
    sign * number + offset for number in (signal.SIGXCPU, signal.SIGKILL) for sign, offset in ((-1, 0), (1, 128))
]


class CannotStart(Exception):  # noqa: N818
    """The runner could not start a program."""


def main(control, limits, isolation, folder):
    """Judge the job on standard input; never returns."""
    verdict = {"isolation": isolation, "passed": False, "stopped": False}
    try:
        job = json.loads(os.fdopen(0, "rb", closefd=False).read())
        out = os.dup(1)
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(devnull, descriptor)
        kernel.drop_privileges()
        resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
        judge = Judge(control, job["program"], limits, folder)
        try:
            if isinstance(job["tests"], str):
                verdict["passed"] = judge.passes(job["tests"])
            else:
                verdict["passed"] = all(judge.prints(case["input"], case["output"]) for case in job["tests"])
        except CannotStart as error:
            verdict["error"] = str(error)
        verdict["stopped"] = judge.was_stopped
        os.write(out, json.dumps(verdict).encode() + b"\n")
    finally:
        os._exit(0)


class Judge:
    """Judges one program.

    Attributes:
        was_stopped: whether it ran too long.
    """

    def __init__(self, control, program, limits, folder):
        self._control, self._limits, self._folder = control, limits, folder
        self._program = _file(program)
        self.was_stopped = False

    def prints(self, given, expected):
        """Whether the program exits with 0 and prints ``expected``."""
        out = _file("")
        self._start(_file(given), out)
        status = self._status()
        most = self._limits["file_bytes"]
        printed = os.pread(out, most, 0).decode(errors="replace")
        os.close(out)
        return status["code"] == 0 and _lines(printed) == _lines(expected)

    def passes(self, tests):
        """Whether ``tests`` run to their end without an exception."""
        # The first run's folder: tests may look at files that the program has written.
        own, other = socket.socketpair()
        self._start(_file(""), os.open(os.devnull, os.O_WRONLY), other.fileno())
        other.close()
        os.chdir(os.path.join(self._folder, "program1"))
        peer, passed = bridge.Peer(own, trusts=False), False
        try:
            passed = _run_tests(tests, peer)
        except BaseException:  # any exception of tests or program means that the program has not passed
            passed = False
        # A lost connection means that the program has ended or is about to: its exit status says why.
        self._control.send(b"lost" if peer.is_broken else b"stop")
        self._status()
        return passed and not peer.is_broken

    def _start(self, given, out, *channel):
        socket.send_fds(self._control, [b"start"], [given, out, self._program, *channel])
        reply = self._receive()
        os.close(given)
        if reply != "ready":
            raise CannotStart(reply["error"])

    def _status(self):
        status = self._receive()
        self.was_stopped |= status["stopped"] or status["code"] in _KILLED
        return status

    def _receive(self):
        return json.loads(self._control.recv(1 << 16))


def _run_tests(tests, peer):
    peer.request("run")
    tree = ast.parse(tests, "tests.py")
    wanted, taken_of = _wanted(tree)
    found = peer.request("look_up", *sorted(wanted))
    names = {"__name__": "__main__", "__builtins__": builtins}
    for name, value in found.items():
        if name not in wanted:
            raise ValueError("a name that was not requested")
        names[name] = value
        if isinstance(value, Remote) and remote_fields(value).kind == "class":
            peer.named_classes.add(remote_fields(value).number)
    names.update(_modules(taken_of, names))
    exec(compile(tree, "tests.py", "exec"), names)
    return True


def _wanted(tree):
    """The names that the tests take from the program, and the attributes of names that are only used for attributes.

    A builtin name is the program's only if the tests use no other name of the program: ``sum(10, 15)`` uses the
    program's ``sum``, ``abs(root(2) - 1.41)`` Python's ``abs``.
    """
    loaded, own, called, taken_of = set(), set(), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else own).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.arg):
            own.add(node.arg)
        elif isinstance(node, ast.alias):
            own.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            own.add(node.name)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken_of.setdefault(node.value.id, set()).add(node.attr)
            called.add(id(node.value))
    bare = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called}
    python = set(vars(builtins))
    wanted = loaded - python
    if not wanted - own:
        wanted = loaded
    return wanted, {name: attributes for name, attributes in taken_of.items() if name not in bare | own}


def _modules(taken_of, names):
    """Modules that the program imports and the tests use, imported here instead of taken from the program."""
    found = {}
    for name, attributes in taken_of.items():
        value = names.get(name)
        is_module = isinstance(value, Remote) and remote_fields(value).kind == "module"
        module = _ALIASES.get(name, name)
        if module not in sys.stdlib_module_names and name not in _ALIASES:
            continue
        if module in ("this", "antigravity") or (name in _ALIASES and name not in names):
            continue
        try:
            __import__(module)
        except ImportError:
            continue
        if is_module or all(hasattr(sys.modules[module], attribute) for attribute in attributes):
            found[name] = sys.modules[module]
    return found


def _file(text):
    """An unnamed file in memory with ``text``."""
    descriptor = os.memfd_create("text")
    data = memoryview(text.encode(errors="replace"))
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _lines(text):
    """The lines, without blanks at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
