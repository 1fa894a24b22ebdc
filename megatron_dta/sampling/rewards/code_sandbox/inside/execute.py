"""Executes a program's text as ``__main__``, and calls one of its functions. Sent to sandbox servers too."""

import builtins
import json
import os
import site
import sys
import types

site.setquit()  # ``exit`` and ``quit``, which the interpreter's option -S leaves out

# What programs in the style of LeetCode use without importing it.
_MODULES = "string re datetime copy random operator heapq bisect math functools itertools collections typing"


def prelude():
    """Names of the standard library, as further builtins: they are not the program's names."""
    names = {}
    exec("".join(f"import {name}\nfrom {name} import *\n" for name in _MODULES.split()), names)
    return {**names, **vars(builtins)}


def execute(program, path, **names):
    """Run ``program`` as the main module; its namespace."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __file__=path)
    sys.modules["__main__"] = main
    sys.argv = [path]
    exec(compile(program, path, "exec", dont_inherit=True), main.__dict__)
    return main.__dict__


def write_result(program, path, name, arguments):
    """Call the function ``name``, or the method of the class ``Solution``, and write its value to stdout as JSON.

    What the program prints does not reach the output.
    """
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    names = execute(program, path, __builtins__=prelude())
    function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
    # Arrays and numbers of NumPy have ``tolist``; other objects are no data.
    text = json.dumps(function(*arguments), default=lambda value: value.tolist()).encode()
    while text:
        text = text[os.write(output, text) :]
    os._exit(0)
