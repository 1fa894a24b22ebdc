"""Limits the process in which it runs, and those that this process starts."""

import os
import resource
from contextlib import suppress


def prepare(limits):
    """Set the limits, and become the user of ``limits`` if there is one."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
        file.write("1000")  # the kernel must not end the trainer instead
    os.closerange(3, 256)
    if limits["user"]:
        os.setgroups([])
        os.setresgid(limits["user"], limits["user"], limits["user"])
        os.setresuid(limits["user"], limits["user"], limits["user"])
    for name, value in (
        ("AS", limits["memory"]),
        ("NPROC", limits["processes"] + 1),
        ("NOFILE", 256),
        ("CORE", 0),
        ("MSGQUEUE", 0),
        ("MEMLOCK", 0),
        ("SIGPENDING", 256),
    ):
        number = getattr(resource, f"RLIMIT_{name}", None)
        if number is not None:
            most = resource.getrlimit(number)[1]
            value = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(number, (value, value))
