"""Runs programs that a model has written apart from the tests that judge them.

Three kinds of processes work on one response, all started by ``run.py``:

    runner    starts programs, enforces their limits and ends everything that they leave behind
    judge     holds the tests, asks the program for values through a socket, compares outputs, and writes the verdict
    program   the response's code; it holds neither the tests nor a descriptor of the judge's

``kernel.py`` holds what the kernel offers to confine a process, ``isolation.py`` the ways to use it, ``bridge.py`` the
calls and values between judge and program. ``run.py`` is a script: it and the modules beside it import nothing else of
this project, because they must start fast.
"""
