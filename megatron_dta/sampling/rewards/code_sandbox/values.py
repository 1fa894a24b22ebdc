"""Encodes values as JSON: data by value and mutable containers by number, so that object identity is preserved.

Pickle is not used: arriving JSON is untrusted and can only produce data. Functions, classes and objects of the program
are left to ``refer`` and ``resolve``.
"""

import base64
import builtins
import collections
import sys
import types

LISTS, SETS, PAIRS = ("list", "deque", "bytearray"), ("set",), ("dict", "OrderedDict", "Counter", "defaultdict")
_PLAIN = (type(None), bool, str, float)
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, list, dict, set, tuple)}


class Graph:
    """The mutable containers of one call and its reply, by number.

    Args:
        refer: returns the JSON that represents an object that is not data.
        resolve: the inverse of ``refer``.
    """

    def __init__(self, refer, resolve):
        self._refer, self._resolve = refer, resolve
        self._objects, self._numbers, self._sent = [], {}, {}

    def encode(self, value):
        """JSON for ``value`` and, by number, for the containers that are new or changed since they were received."""
        found = self._encode(value)
        contents, number = {}, 0
        while number < len(self._objects):  # grows on the way
            content = self._content(self._objects[number])
            if self._sent.get(number) != content:
                contents[number] = self._sent[number] = content
            number += 1
        return found, contents

    def decode(self, value, contents):
        """The inverse of ``encode``; known containers get their new contents in place."""
        contents = {int(number): content for number, content in contents.items()}
        for number in sorted(contents):
            if number == len(self._objects):
                self._add(_empty(contents[number]))
        for number, content in contents.items():
            self._fill(self._objects[number], content[1])
            self._sent[number] = content
        return self._decode(value)

    def _add(self, container):
        self._numbers[id(container)] = len(self._objects)
        self._objects.append(container)
        return len(self._objects) - 1

    def _encode(self, value):
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -(1 << 63) <= value < 1 << 63 else ["int", hex(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, [self._encode(item) for item in value]]
        if kind.__name__ in LISTS + SETS + PAIRS and kind.__module__ in ("builtins", "collections"):
            return ["node", self._numbers[id(value)] if id(value) in self._numbers else self._add(value)]
        for base in (int, float, str):
            if isinstance(value, base) and not kind.__module__.startswith("numpy"):
                return self._encode(base.__new__(base, value) if base is not str else str.__str__(value))
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            return ["namedtuple", kind.__name__, list(kind._fields), [self._encode(item) for item in value]]
        coded = _encode_other(value, kind)
        if coded is None:
            if isinstance(value, VIEWS):
                return ["view", type(value).__name__, [self._encode(item) for item in value]]
            return self._refer(value)
        return coded

    def _content(self, value):
        kind = type(value).__name__
        if kind in PAIRS:
            content = [[self._encode(key), self._encode(item)] for key, item in value.items()]
        else:
            content = [self._encode(item) for item in value]
        if kind == "deque":
            kind = ["deque", value.maxlen]
        elif kind == "defaultdict":
            kind = ["defaultdict", getattr(value.default_factory, "__name__", None)]
        return [kind, content]

    def _decode(self, value):
        if not isinstance(value, list):
            return value
        tag, *rest = value
        if tag == "node":
            return self._objects[rest[0]]
        if tag in ("tuple", "frozenset"):
            return (tuple if tag == "tuple" else frozenset)(self._decode(item) for item in rest[0])
        if tag == "namedtuple":
            return collections.namedtuple(rest[0], rest[1])(*(self._decode(item) for item in rest[2]))
        if tag == "view":
            items = [self._decode(item) for item in rest[1]]
            if rest[0] == "dict_keys":
                return dict.fromkeys(items).keys()
            return dict(items).items() if rest[0] == "dict_items" else dict(enumerate(items)).values()
        if tag in _DECODERS:
            return _DECODERS[tag](*rest)
        return self._resolve(value)

    def _fill(self, container, content):
        if isinstance(container, dict):
            pairs = [(self._decode(key), self._decode(item)) for key, item in content]
            container.clear()
            for key, item in pairs:
                container[key] = item
            return
        items = [self._decode(item) for item in content]
        if isinstance(container, list | bytearray):
            container[:] = items
        else:
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(items)


VIEWS = (type({}.keys()), type({}.values()), type({}.items()))


def _empty(content):
    kind = content[0]
    if isinstance(kind, list):
        if kind[0] == "deque":
            return collections.deque(maxlen=kind[1])
        return collections.defaultdict(_FACTORIES.get(kind[1]))
    return {
        "list": list, "bytearray": bytearray, "set": set, "dict": dict,
        "OrderedDict": collections.OrderedDict, "Counter": collections.Counter,
    }[kind]()  # fmt: skip


def _encode_other(value, kind):
    """JSON for data of less common types; None for other values."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _ENCODERS:
        return [name, *_ENCODERS[name](value)]
    if isinstance(value, type | types.BuiltinFunctionType) and value is getattr(builtins, value.__name__, None):
        return ["builtin", value.__name__]
    if kind.__module__ == "numpy" and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        if isinstance(value, numpy.ndarray | numpy.generic) and not value.dtype.hasobject:
            data = base64.b64encode(value.tobytes()).decode()
            return ["numpy", numpy.lib.format.dtype_to_descr(value.dtype), list(value.shape), data]
    return None


def _fraction(*arguments):
    from fractions import Fraction

    return Fraction(*arguments)


def _decimal(text):
    from decimal import Decimal

    return Decimal(text)


def _array(kind, shape, data):
    import numpy

    if isinstance(kind, list):
        kind = [tuple(field) for field in kind]
    array = numpy.frombuffer(base64.b64decode(data), numpy.dtype(kind)).reshape(shape).copy()
    if array.dtype.hasobject:
        raise ValueError("an array of objects")
    return array[()] if not shape else array


def _dated(name):
    def make(*arguments):
        import datetime

        kind = getattr(datetime, name)
        return kind.fromisoformat(*arguments) if name in ("time", "datetime") else kind(*arguments)

    return make


_ENCODERS = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.bytes": lambda value: (value.hex(),),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "builtins.ellipsis": lambda value: (),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.time": lambda value: (value.isoformat(),),
    "datetime.datetime": lambda value: (value.isoformat(),),
}
_DECODERS = {
    "int": lambda text: int(text, 16),
    "builtins.complex": complex,
    "builtins.bytes": bytes.fromhex,
    "builtins.range": range,
    "builtins.slice": slice,
    "builtins.ellipsis": lambda: ...,
    "fractions.Fraction": _fraction,
    "decimal.Decimal": _decimal,
    **{f"datetime.{name}": _dated(name) for name in ("date", "timedelta", "time", "datetime")},
    "numpy": _array,
}
