"""A reference to an object of the other side, used as the object itself would be.

Tests compare values. What the program makes may claim to equal anything, so its claims do not count against data that
the tests hold: a reference equals no data and is not ordered before or after any. Arithmetic with data is
done only for instances of classes that the tests name, and what comes of it is a reference again, never a number that
the program computed from the expected one.
"""

import builtins
import operator
import types

_FIELDS = types.SimpleNamespace


class Remote:
    """See on top.

    Args:
        peer: that asks the other side.
        number: the object's number there.
        kind: object, class, module or coroutine.
        name: its name, for messages.
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

    def __setattr__(self, name, value):
        _ask(self, "setattr", name, value)

    def __delattr__(self, name):
        _ask(self, "delattr", name)

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

    def __next__(self):
        return _ask(self, "next")

    def __reversed__(self):
        return _Iterator(_ask(self, "reversed"))

    def __bool__(self):
        return _typed(self, "bool", bool)

    def __len__(self):
        return _typed(self, "len", int)

    def __int__(self):
        return _typed(self, "int", int)

    def __index__(self):
        return _typed(self, "index", int)

    def __float__(self):
        return _typed(self, "float", float)

    def __complex__(self):
        return _typed(self, "complex", complex)

    def __str__(self):
        return _typed(self, "str", str)

    def __repr__(self):
        return _typed(self, "repr", str)

    def __getitem__(self, key):
        return _ask(self, "getitem", key)

    def __setitem__(self, key, value):
        _ask(self, "setitem", key, value)

    def __delitem__(self, key):
        _ask(self, "delitem", key)

    def __enter__(self):
        return _ask(self, "enter")

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
    """What stands behind a reference; a function, because its attributes are those of the object."""
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
    """Arithmetic; what is computed with data of the tests' must stay a reference."""
    with_data = remote_fields(remote).is_derived or any(not isinstance(value, Remote) for value in values)
    return _derived(remote, _ask(remote, operation, *values)) if with_data else _ask(remote, operation, *values)


def _derived(remote, result):
    """``result`` of ``remote`` and data."""
    fields = remote_fields(remote)
    if fields.peer.trusts:
        return result
    if fields.parent not in fields.peer.named_classes:
        raise TypeError("arithmetic of data and an object whose class the tests do not name")
    if not isinstance(result, Remote):
        raise TypeError("arithmetic of data and an object must give an object")
    remote_fields(result).is_derived = True
    return result


def _binary(name):
    def compute(self, other):
        return _computed(self, name, other)

    return compute


def _reflected(name):
    def compute(self, other):
        return _derived(self, _ask(self, "reflected", name, other))

    return compute


def _ordered(name):
    def compare(self, other):
        if isinstance(other, Remote) or remote_fields(self).peer.trusts:
            return _ask(self, name, other) is True
        return NotImplemented

    return compare


def _unary(name):
    def compute(self):
        return _computed(self, name)

    return compute


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift"):
    _plain = _name.rstrip("_")
    setattr(Remote, f"__{_plain}__", _binary(_name))
    setattr(Remote, f"__r{_plain}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _ordered(_name))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Remote, f"__{_name}__", _unary(_name))


def reflected(value, name, other):
    """``other`` OPERATOR ``value``, on the side that holds ``value``."""
    return getattr(operator, name)(other, value)


def exception_class(peer, number, name, base):
    """A class that stands for the other side's exception class ``number``, so that ``except`` finds it."""
    parent = getattr(builtins, str(base), Exception)
    if not (isinstance(parent, type) and issubclass(parent, BaseException)):
        parent = Exception
    return type(str(name) or "Error", (parent,), {"__module__": "program"})
