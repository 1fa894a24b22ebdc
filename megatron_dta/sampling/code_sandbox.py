"""Started as a script, by file: limits itself, then becomes the program that a model has written.

    python -I code_sandbox.py CPU_SECONDS MEMORY_BYTES FILE_BYTES PROCESSES STATUS_DESCRIPTOR COMMAND...

On the status descriptor comes ``isolated`` or ``limited`` and a line end when all limits hold and COMMAND is about to
run; nothing, and a message on standard error, if they do not. Isolated: where the kernel allows it, in namespaces of
its own, so there is no network, and all descendants end with the program. This is protection against mistakes and
against programs that run wild, not against an attacker: run training where a model's programs may read what it can.

It imports nothing of this project: it must start fast, and with ``-I`` it could not.
"""

import ctypes
import os
import resource
import signal
import sys

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID = 0x10000000, 0x40000000, 0x20000000


def isolate():
    """Into namespaces of our own; whether that went."""
    user, group = os.geteuid(), os.getegid()
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID) != 0:
            return False
        # The same user inside: files stay ours, and no other user's can be taken on.
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except (OSError, AttributeError):
        return False
    return True


def own_processes():
    """Processes and threads that the user has: the kernel counts all of them."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return count


def main():
    cpu_s, memory, file_bytes, processes, status = (int(value) for value in sys.argv[1:6])
    command = sys.argv[6:]
    room = own_processes() + processes
    isolated = isolate()
    if isolated:
        child = os.fork()
        if child:
            # The first process of the new namespace: when it ends, all others in it do.
            _, found = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(found)
            if code < 0:
                signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
                os._exit(128 - code)
            os._exit(code)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_NPROC, (room, room))
    os.write(status, b"isolated\n" if isolated else b"limited\n")
    os.set_inheritable(status, False)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
