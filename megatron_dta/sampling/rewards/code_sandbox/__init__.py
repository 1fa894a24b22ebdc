"""Runs programs written by a model, separated from the tests that judge them.

Three kinds of processes work on one response, all started by ``run.py``:

    runner    starts programs, enforces their limits and ends all processes that they leave behind
    judge     holds the tests, asks the program for values through a socket, compares outputs, and writes the verdict
    program   the code of the response; it has access neither to the tests nor to a descriptor of the judge

``kernel.py`` wraps the kernel's means to confine a process, ``isolation.py`` combines them, and ``bridge.py`` exchanges
calls and values between judge and program. ``run.py`` is a script. It and the modules beside it import nothing else
from this project, because they must start fast.
"""
