"""Exchanges calls and values between judge and program; each side has references to objects of the other.

A message is its length and JSON. A request is ``{"do": operation, "with": values}``, and its reply is
``{"give": value}`` or ``{"raise": ...}``. While a side waits for a reply, it serves requests of the other side, such as
calls of a function that the tests passed. Data is copied (``values.py``). The program is not trusted: the judge accepts
data and references from it and lets it call only what the tests have passed.
"""

import builtins
import io
import json
import operator
import os
import socket
import struct
import sys
import types

from remote import Remote, exception_class, reflected, remote_fields
from values import Graph

MOST_MESSAGE_BYTES = 64 << 20
_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS += ("and_", "or_", "xor", "lshift", "rshift", "neg", "pos", "abs", "invert", "index", "getitem", "setitem")
_OPERATIONS = {
    **{name: getattr(operator, name) for name in (*_OPERATORS, "delitem", "contains")},
    **{function.__name__: function for function in (
        getattr, setattr, delattr, len, iter, next, reversed, bool, str, repr, int, float, complex, round, divmod, dir,
    )},
    "isinstance": lambda kind, value: isinstance(value, kind),
    "issubclass": lambda kind, value: issubclass(value, kind),
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
}  # fmt: skip
# The attributes of these lead to frames, and so to the names of the judge.
_CLOSED = (
    types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType,
    types.TracebackType, types.ModuleType,
)  # fmt: skip


class ProgramEnded(BaseException):  # tests that expect exceptions must not catch it
    """The other side has ended or sent an invalid message."""


class Peer:
    """One end of the connection.

    Args:
        channel: a connected stream socket.
        trusts: whether the other side may do anything with its references; true at the program's end.

    Attributes:
        is_broken: whether the other side has ended or broken the protocol.
        named_classes: references to classes that the tests name.
    """

    def __init__(self, channel, trusts):
        self._channel, self.trusts = channel, trusts
        self._objects, self._numbers, self._remotes, self._classes = [], {}, {}, {}
        self.is_broken, self.named_classes = False, set()
        self.printed = None

    def request(self, operation, *values, **named):
        """The other side's result; its exceptions are raised here."""
        graph = Graph(self._refer, self._resolve)
        coded, nodes = graph.encode((values, named))
        self._send({"do": operation, "with": coded, "nodes": nodes})
        while True:
            message = self._receive()
            if "do" in message:
                self._reply(message)
                continue
            try:
                if message.get("printed") and sys.stdout is not sys.__stdout__:
                    sys.stdout.write(message["printed"])
                if "give" in message:
                    return graph.decode(message["give"], message["nodes"])
                error = self._error(*Graph(self._refer, self._resolve).decode(message["raise"], message["nodes"]))
            except Exception as fault:
                self._break(fault)
            raise error

    def serve(self):
        """Serve requests until the other side ends."""
        while True:
            self._reply(self._receive())

    def _reply(self, message):
        graph = Graph(self._refer, self._resolve)
        try:
            values, named = graph.decode(message["with"], message["nodes"])
            operation = message["do"]
        except Exception as error:
            self._break(error)
        try:
            result = self._perform(operation, values, named)
            coded, nodes = graph.encode(result)
            reply = {"give": coded, "nodes": nodes}
        except ProgramEnded:
            raise
        except BaseException as error:
            graph = Graph(self._refer, self._resolve)
            coded, nodes = graph.encode(_fault(error))
            reply = {"raise": coded, "nodes": nodes}
        if self.printed is not None:
            reply["printed"] = self.printed.take()
        self._send(reply)

    def _perform(self, operation, values, named):
        if operation in self._extra:
            return self._extra[operation](*values)
        target = values[0]
        if not self.trusts:
            if id(target) not in self._numbers:
                raise TypeError("only what the tests passed can be used")
            if operation in ("getattr", "setattr", "delattr") and (
                str(values[1]).startswith("_") or isinstance(target, _CLOSED)
            ):
                raise AttributeError(f"{values[1]} is closed to programs")
        return _OPERATIONS[operation](*values, **named)

    _extra = types.MappingProxyType({})

    def offer(self, **operations):
        """Offer operations in addition to those on objects."""
        self._extra = operations

    def _refer(self, value):
        if isinstance(value, Remote):
            return ["yours", remote_fields(value).number]
        if isinstance(value, type | types.BuiltinFunctionType) and value is getattr(
            builtins, getattr(value, "__name__", ""), None
        ):
            return ["builtin", value.__name__]
        for number, kind in self._classes.items():
            if kind is value:
                return ["yours", number]
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        kind, parent = "object", None
        if isinstance(value, type):
            kind = "class"
            if issubclass(value, BaseException):
                kind, parent = "exception", _builtin_base(value)
        elif isinstance(value, types.CoroutineType):
            kind = "coroutine"
        elif isinstance(value, types.ModuleType):
            kind, parent = "module", value.__name__
        elif not isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
            parent = self._number_of(type(value))
        name = getattr(value, "__name__", None)
        return ["mine", self._numbers[id(value)], kind, name if isinstance(name, str) else "", parent]

    def _number_of(self, kind):
        if kind.__module__ == "builtins":
            return None
        if id(kind) not in self._numbers:
            self._numbers[id(kind)] = len(self._objects)
            self._objects.append(kind)
        return self._numbers[id(kind)]

    def _resolve(self, coded):
        tag, *rest = coded
        if tag == "yours":
            return self._objects[rest[0]]
        if tag == "builtin":
            found = getattr(builtins, rest[0])
            if not self.trusts and not isinstance(found, type):
                raise ValueError(f"{rest[0]}: a function of the other side cannot be one of this side")
            return found
        if tag != "mine":
            raise ValueError(f"{str(tag)[:40]} is not a kind of value")
        number, kind, name, parent = rest
        if kind == "exception":
            if number not in self._classes:
                self._classes[number] = exception_class(self, number, name, parent)
            return self._classes[number]
        if number not in self._remotes:
            self._remotes[number] = Remote(self, number, kind, str(name), parent)
        found = self._remotes[number]
        return _awaited(found) if kind == "coroutine" else found

    def _error(self, kind, arguments, text):
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            kind = RuntimeError
        try:
            return kind(*arguments)
        except Exception:
            return kind(str(text))

    def _send(self, message):
        data = json.dumps(message).encode()
        try:
            if len(data) > MOST_MESSAGE_BYTES:
                raise OSError("a message is too long")
            self._channel.sendall(struct.pack("=I", len(data)) + data)
        except OSError as error:
            self._break(error)

    def _receive(self):
        try:
            length = struct.unpack("=I", self._read(4))[0]
            if length > MOST_MESSAGE_BYTES:
                raise OSError("a message is too long")
            message = json.loads(self._read(length))
            if not isinstance(message, dict):
                raise ValueError("no message")
            return message
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            self._break(error)

    def _read(self, length):
        parts = []
        while length:
            part = self._channel.recv(min(length, 1 << 20))
            if not part:
                raise OSError("the other side has ended")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _break(self, error):
        self.is_broken = True
        raise ProgramEnded(str(error)) from error


class Printed(io.StringIO):
    """Standard output of a program that tests call; it is sent to them with each reply."""

    most = 1 << 20

    def write(self, text):
        if self.tell() + len(text) > self.most:
            raise OSError("too much output")
        return super().write(text)

    def take(self):
        """The text printed since the last call."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


def start_program(source, channel):
    """Read the program from descriptor ``source``. Returns a function that runs it as ``__main__``.

    With a ``channel`` the function serves the tests; without one the program reads and prints.
    """
    os.lseek(source, 0, os.SEEK_SET)  # an earlier run has read it
    with open(source, "rb") as file:
        text = file.read().decode()
    with open("program.py", "w", encoding="utf-8") as file:
        file.write(text)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        number = ("stdin", "stdout", "stderr").index(name)
        stream = os.fdopen(number, mode, errors="surrogateescape", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath("program.py")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    names = module.__dict__
    if not _is_open(channel):
        return lambda: exec(compile(text, "program.py", "exec"), names)
    peer = Peer(socket.socket(fileno=channel), trusts=True)
    peer.printed = sys.stdout = Printed()

    def run():
        exec(compile(text, "program.py", "exec"), names)

    def look_up(*wanted):
        return {name: names[name] for name in wanted if name in names}

    peer.offer(run=run, look_up=look_up)
    return peer.serve


def _is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _awaited(remote):
    async def wait():
        return remote_fields(remote).peer.request("await", remote)

    return wait()


def _fault(error):
    try:
        text = str(error)
    except Exception:
        text = ""
    return type(error), tuple(error.args), text


def _builtin_base(kind):
    return next(base.__name__ for base in kind.__mro__ if base is getattr(builtins, base.__name__, None))


def _await(coroutine):
    import asyncio

    return asyncio.run(coroutine)


_OPERATIONS.update({"await": _await, "reflected": reflected})
