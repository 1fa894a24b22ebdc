"""Runs a program once for each test, in a process of its own, and writes what it prints or returns to stdout.

The only argument is JSON, the limits. Standard input is JSON:
the program, its inputs, and the name of a function if it is called. The output is a line ``started`` and, for each
test, a line of JSON (exit status, CPU seconds, number of bytes) and the bytes.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from contextlib import suppress

from execute import execute, prelude, write_result
from limits import prepare

del sys.path[0]  # the folder of this script

PR_SET_DUMPABLE = 4
# What the kernel leaves free above the first mapped library.
STACK_BYTES = 100 << 20


def unnamed():
    """A file in the working folder without a name; the folder's limit counts it, unlike a file in memory."""
    file = os.open("unnamed", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink("unnamed")
    return file


def start(text, limits, folder):
    """A process for one test, and the file of its output; returns twice, in the process itself with the id 0."""
    stdin, output = unnamed(), unnamed()
    text = text.encode()
    while text:
        text = text[os.write(stdin, text) :]
    os.lseek(stdin, 0, os.SEEK_SET)
    pid = os.fork()
    if pid:
        os.close(stdin)
        return pid, output
    for number, descriptor in enumerate((stdin, output, os.open(os.devnull, os.O_WRONLY))):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    os.mkdir(folder)
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"], limits["file_bytes"]))
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES if most < 0 else min(STACK_BYTES, most), most))
    return 0, -1


def finish(pid, output, limits):
    """Wait for a test's process, end what it left behind, and write its outcome; whether it exited with 0."""
    _, status, usage = os.wait4(pid, 0)
    if limits["is_confined"]:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # all processes of this namespace but the caller and the first
    code, count = os.waitstatus_to_exitcode(status), os.fstat(output).st_size
    head = {"code": code, "cpu": usage.ru_utime + usage.ru_stime, "bytes": count}
    os.write(1, json.dumps(head).encode() + b"\n")
    sent = 0
    while sent < count:
        part = os.sendfile(1, output, sent, count - sent)
        if not part:
            sys.exit("an output was cut by another process")
        sent += part
    os.close(output)
    return code == 0


def main():
    """Run all tests, up to the first that does not exit with 0; in the process of a test, the program."""
    limits = json.loads(sys.argv[1])
    prepare(limits)
    # Programs of the same user could change this process through /proc otherwise.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.path += limits["packages"]
    with os.fdopen(0, "rb", closefd=False) as file:
        job = json.loads(file.read())
    path = os.path.join(os.getcwd(), "program.py")
    with open(path, "w", encoding="utf-8") as file:
        file.write(job["program"])
    if job["function"] is not None:
        prelude()  # imports its modules once, before the processes of the tests start
    os.write(1, b"started\n")
    for index, test_input in enumerate(job["inputs"]):
        text = test_input if job["function"] is None else ""
        pid, output = start(text, limits, f"{os.path.dirname(path)}/{index}")
        if pid == 0:
            if job["function"] is None:
                execute(job["program"], path)
            else:
                write_result(job["program"], path, job["function"], test_input)
            return
        if not finish(pid, output, limits):
            return


if __name__ == "__main__":
    main()
