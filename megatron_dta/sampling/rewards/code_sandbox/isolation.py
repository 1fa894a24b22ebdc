"""Isolates programs with namespaces, bubblewrap, or limits with Landlock.

Each way has ``enter``, called once by the runner, and ``launch``, called in a new process for every run. The launched
process supervises the program, which ends with it. Its descriptors have the numbers below.
"""

import json
import os
import resource
import signal
import sys
import time
from contextlib import suppress

import kernel

STDIN, STDOUT, STDERR, SOURCE, READY, BRIDGE = range(6)
MOST_FILES_BYTES = 64 << 20
WATCH_SECONDS = 0.05
# Folders with other programs' files and sockets; a program gets empty ones or none.
SCRATCH, HIDDEN = "/tmp", ("/run", "/var/tmp", "/dev/shm")
OVER_A_LIMIT = 124


class StartProgram(BaseException):  # no error: it unwinds the stack of the process that becomes the program
    """Raised in the process that is to become the program."""


class Namespaces:
    """Own process, mount, network and IPC namespaces: all else is read-only, and no process survives the first one."""

    name = "namespaces"

    def enter(self, folder):
        kernel.enter_user_namespace(kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_UTS)
        kernel.keep_mounts_private()
        needed = [(os.open(path, os.O_PATH | os.O_CLOEXEC), path) for path in _python_below(SCRATCH, *HIDDEN)]
        writable = [SCRATCH]
        kernel.mount_tmpfs(SCRATCH, MOST_FILES_BYTES, "1777")
        for path in HIDDEN:
            if os.path.isdir(path) and not os.path.islink(path):
                kernel.mount_tmpfs(path, MOST_FILES_BYTES, "1777")
                writable.append(path)
        for descriptor, path in needed:
            os.makedirs(path, exist_ok=True)
            kernel.bind(descriptor, path)
            os.close(descriptor)
        kernel.make_read_only(writable)
        return SCRATCH

    def launch(self, limits, folder):
        kernel.unshare(kernel.NEW_PIDS | kernel.NEW_MOUNTS)
        first = os.fork()
        if first:
            close_from(STDIN)
            _exit_like(os.waitpid(first, 0)[1])
        kernel.die_with_parent(signal.SIGKILL)
        with suppress(OSError):
            kernel.mount_proc()
        supervise(limits, folder, lambda: [int(name) for name in os.listdir("/proc") if name.isdecimal()])


class Bubblewrap:
    """The same with bwrap, which may have rights that this process lacks (AppArmor, set-user-id)."""

    name = "bubblewrap"

    def enter(self, folder):
        return folder

    def launch(self, limits, folder):
        here = os.path.dirname(os.path.abspath(__file__))
        command = [limits["bwrap"], "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        for path in (SCRATCH, *HIDDEN[:2]):
            if os.path.isdir(path) and not os.path.islink(path):
                command += ["--tmpfs", path]
        for path in (*_python_below(SCRATCH, *HIDDEN), here):
            command += ["--ro-bind", path, path]
        command += ["--bind", folder, folder, "--chdir", folder, "--"]
        command += [sys.executable, "-I", "-X", "utf8", os.path.join(here, "run.py")]
        os.execv(command[0], [*command, json.dumps(limits | {"folder": folder, "inside": True})])

    def launch_inside(self, limits, folder):
        """Called in the process that bwrap starts."""
        supervise(limits, folder, lambda: [int(name) for name in os.listdir("/proc") if name.isdecimal()])


class Limits:
    """Limits only, and Landlock if the kernel has it."""

    name = "limits"

    def enter(self, folder):
        return folder

    def launch(self, limits, folder):
        kernel.adopt_descendants()
        supervise(limits, folder, lambda: kernel.descendants(os.getpid()), landlock=kernel.landlock_version() > 0)


WAYS = {way.name: way for way in (Namespaces, Bubblewrap, Limits)}


def counted_processes(way):
    """Number of processes and threads that already count against the program's limit on processes."""
    release = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
    if way.name != "limits" and release >= (5, 14):
        return 8  # counted for each user namespace: the runner, the judge, the supervisor
    count, user = 0, os.getuid()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def supervise(limits, folder, processes, landlock=False):
    """Start the program. End with it, or when it has too many processes or too much memory."""
    program = os.fork()
    if program == 0:
        _become_program(limits, folder, landlock)
    go_ahead()
    kernel.set_dumpable(False)
    close_from(STDIN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    own, found = {os.getpid(), 1} if os.getpid() < 3 else {os.getpid()}, None
    while found is None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                found = ended[1] if ended[0] == program else found
        if found is None:
            tasks, memory = kernel.usage(set(processes()) - own)
            if tasks > limits["processes"] or memory > limits["memory"]:
                os._exit(_end_descendants(OVER_A_LIMIT))
            signal.sigtimedwait([signal.SIGCHLD], WATCH_SECONDS)
    _end_descendants(0)
    _exit_like(found)


def end_descendants(spared=()):
    """Kill and reap all descendants except those in ``spared``; the caller adopts orphans.

    A program may fork faster than it is listed, and the kernel does not limit the processes of root. So this goes ahead
    of all programs where it may, and does not wait for those that are killed while others go on.
    """
    own, usual = os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)
    go_ahead()
    while direct := [pid for pid in kernel.children(own) if pid not in spared]:
        for pid in [*direct, *(pid for child in direct for pid in kernel.descendants(child))]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in direct:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)
    os.setpriority(os.PRIO_PROCESS, 0, usual)


def go_ahead():
    """Give this process the highest priority, if its user may."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def _end_descendants(code):
    if os.getpid() != 1:  # the kernel ends the other processes of a namespace with its first one
        end_descendants()
    return code


def _become_program(limits, folder, landlock):
    """Confine this process and unwind to its script, which runs the program."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        os.setsid()
        os.chdir(folder)
        for name, value in (
            (resource.RLIMIT_CPU, limits["cpu_s"]), (resource.RLIMIT_AS, limits["memory"]), (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]), (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_NPROC, limits["user_processes"]),
        ):  # fmt: skip
            resource.setrlimit(name, (value, value))
        if landlock:
            kernel.restrict_with_landlock(folder)
        kernel.drop_privileges()
        kernel.set_dumpable(True)
        os.environ["HOME"] = folder
        os.write(READY, b"ready")
        os.close(READY)
    except BaseException as error:
        os.write(READY, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(1)
    raise StartProgram


def _python_below(*folders):
    """The folders of Python below one of ``folders``."""
    prefixes = dict.fromkeys(map(os.path.realpath, (sys.prefix, sys.base_prefix, sys.exec_prefix)))
    return [path for path in prefixes if any(path.startswith(folder + "/") for folder in folders)]


def close_from(first):
    """Close all descriptors from ``first`` on."""
    os.closerange(first, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _exit_like(status):
    """Exit like the process of ``status``; 128 + the signal's number for a signal."""
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
