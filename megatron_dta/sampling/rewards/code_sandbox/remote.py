"""References to objects of the other process, which behave like the objects themselves.

Objects of a program may claim to equal anything. So a reference equals no data of the tests, and is not ordered before
or after data. Arithmetic with data is possible only for instances of classes that the tests name, and its result must
be a reference again: the program cannot compute a number from the expected one.
"""

import builtins
import operator
import types
from functools import partialmethod

_FIELDS = types.SimpleNamespace
_CONVERSIONS = {kind.__name__: kind for kind in (bool, int, float, complex, str)}
_CONVERSIONS |= {"len": int, "index": int, "repr": str}


class Remote:
    """A reference; see the module's docstring.

    Args:
        peer: sends requests to the other side.
        number: the object's number on the other side.
        kind: object, class, module or coroutine.
        name: the object's name, for messages.
        parent: the number of its class.
    """

    __slots__ = ("__fields",)

    def __init__(self, peer, number, kind, name, parent):
        fields = _FIELDS(peer=peer, number=number, kind=kind, name=name, parent=parent, is_derived=False)
        object.__setattr__(self, "_Remote__fields", fields)

    def __call__(self, *arguments, **named):
        return _ask(self, "call", *arguments, **named)

    def __getattr__(self, name):
        return _ask(self, "getattr", name)

    def __eq__(self, other):
        if not isinstance(other, Remote) and not remote_fields(self).peer.trusts:
            return False
        return self is other or _ask(self, "eq", other) is True

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return remote_fields(self).number

    def __contains__(self, item):
        return any(item is found or item == found for found in self)

    def __iter__(self):
        return _Iterator(_ask(self, "iter"))

    def __reversed__(self):
        return _Iterator(_ask(self, "reversed"))

    def __exit__(self, *error):
        _ask(self, "exit")

    def __dir__(self):
        return list(_ask(self, "dir"))

    def __instancecheck__(self, value):
        return isinstance(value, Remote) and _ask(self, "isinstance", value) is True

    def __subclasscheck__(self, value):
        return isinstance(value, Remote) and _ask(self, "issubclass", value) is True

    def __round__(self, digits=None):
        if remote_fields(self).is_derived:
            raise TypeError("a value of the program's, computed with one of the tests', is not rounded")
        return _ask(self, "round", *(() if digits is None else (digits,)))


class _Iterator:
    def __init__(self, remote):
        self._remote = remote

    def __iter__(self):
        return self

    def __next__(self):
        return _ask(self._remote, "next")


def remote_fields(remote):
    """The fields of a reference; a function, because the attributes of a reference are those of the object."""
    return object.__getattribute__(remote, "_Remote__fields")


def _ask(remote, operation, *values, **named):
    return remote_fields(remote).peer.request(operation, remote, *values, **named)


def _typed(remote, operation, kind):
    if remote_fields(remote).is_derived and operation not in ("bool", "str", "repr", "len"):
        raise TypeError("a value of the program's, computed with one of the tests', does not become a number")
    value = _ask(remote, operation)
    if type(value) is not kind:
        raise TypeError(f"{operation} gave no {kind.__name__}")
    return value


def _computed(remote, operation, *values):
    """Arithmetic; results of data of the tests must be references."""
    with_data = remote_fields(remote).is_derived or any(not isinstance(value, Remote) for value in values)
    return _derived(remote, _ask(remote, operation, *values)) if with_data else _ask(remote, operation, *values)


def _derived(remote, result):
    """Check and mark the ``result`` of arithmetic with ``remote`` and data."""
    fields = remote_fields(remote)
    if fields.peer.trusts:
        return result
    if fields.parent not in fields.peer.named_classes:
        raise TypeError("arithmetic of data and an object whose class the tests do not name")
    if not isinstance(result, Remote):
        raise TypeError("arithmetic of data and an object must give an object")
    remote_fields(result).is_derived = True
    return result


def _reflected(remote, name, other):
    return _derived(remote, _ask(remote, "reflected", name, other))


def _ordered(remote, name, other):
    if isinstance(other, Remote) or remote_fields(remote).peer.trusts:
        return _ask(remote, name, other) is True
    return NotImplemented


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift"):
    _plain = _name.rstrip("_")
    setattr(Remote, f"__{_plain}__", partialmethod(_computed, _name))
    setattr(Remote, f"__r{_plain}__", partialmethod(_reflected, _name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", partialmethod(_ordered, _name))
for _name in ("setattr", "delattr", "getitem", "setitem", "delitem", "next", "enter"):
    setattr(Remote, f"__{_name}__", partialmethod(_ask, _name))
for _name, _kind in _CONVERSIONS.items():
    setattr(Remote, f"__{_name}__", partialmethod(_typed, _name, _kind))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Remote, f"__{_name}__", partialmethod(_computed, _name))


def reflected(value, name, other):
    """``other`` OPERATOR ``value``, on the side of ``value``."""
    return getattr(operator, name)(other, value)


def exception_class(peer, number, name, base):
    """A class that represents the other side's exception class ``number``, so that ``except`` catches it."""
    parent = getattr(builtins, str(base), Exception)
    if not (isinstance(parent, type) and issubclass(parent, BaseException)):
        parent = Exception
    return type(str(name) or "Error", (parent,), {"__module__": "program"})
