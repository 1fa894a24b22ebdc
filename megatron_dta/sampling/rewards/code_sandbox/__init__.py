"""Runs programs written by a model in a sandbox, and compares what they print or return with what is expected.

    forms         reads the tests of a prompt's record: texts on standard input, or calls of a function
    confinement   the command line of bubblewrap and the system calls that programs may not use
    running       starts a program and its judge, and stops what takes too long
    service       runs programs on a sandbox server instead
    inside/       scripts that run within the sandbox; they import only the standard library, so that they start fast

The program's process gets the inputs. It writes bytes into a pipe, which the judge reads, a second confined process,
which gets the expected outputs. The trainer sees only the judge's verdict, with the first 200 bytes of the first
wrong output as text, for agents that show it to the model.
"""
