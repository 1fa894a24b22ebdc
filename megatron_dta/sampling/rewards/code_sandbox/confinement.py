"""The command line of bubblewrap (``bwrap``) in which programs and their judges run.

Inside there is a read-only system and Python, an empty folder in memory, and /proc and /dev of its own; no network, no
other process, no file of the user, no capability. A small filter of system calls closes what namespaces leave open:
sockets of other families than AF_UNIX (AF_VSOCK reaches the host), namespaces within, kernel keys, memory that no limit
counts (shared memory, memfds), other processes' memory, and io_uring, which would pass the filter by.

Where the trainer is root, programs run as a user id of their own that nobody has; elsewhere they run as the user, in a
user namespace that maps it to 65534.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import shutil
import site
import struct
import sys
from functools import cache
from pathlib import Path

SCRIPTS = "/scripts"
SHARED_BYTES = 64 << 20
# Above the ids that systems and directory services give out, below 2**31.
_FREE_USERS = range(2_100_000_000, 2_147_000_000)
_AF_UNIX, _NEW_NAMESPACES = 1, 0x7E020000
# Numbers on x86_64 and aarch64. Most need a capability too, so that this is the second lock.
_FORBIDDEN = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "memfd_create": (319, 279), "memfd_secret": (447, 447), "personality": (135, 92),
    "inotify_add_watch": (254, 27), "fanotify_init": (300, 262), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "setpriority": (141, 140),
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, 41, 53, 56), "aarch64": (0xC00000B7, 198, 199, 220)}
_CLONE3, _X32 = 435, 0x40000000


def is_root() -> bool:
    """Whether this process may become any user, which root of a container with a mapped user cannot."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        return file.read().split() == ["0", "0", "4294967295"]


def free_user() -> int:
    """A user id that nobody has; 0 if this process cannot change to it."""
    return secrets.choice(_FREE_USERS) if is_root() else 0


def command(scripts: Path, memory_bytes: int, filter_descriptor: int) -> list[str]:
    """The start of a command line; the rest is what runs inside.

    Args:
        scripts: a folder that becomes ``SCRIPTS``.
        memory_bytes: the size of the folder in memory.
        filter_descriptor: of an open file with ``system_call_filter()``.
    """
    bwrap = shutil.which("bwrap") or "bwrap"
    if is_root():
        spaces = "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --cap-drop ALL"
        spaces += " --cap-add CAP_SETUID --cap-add CAP_SETGID"
    else:
        spaces = "--unshare-all --uid 65534 --gid 65534 --cap-drop ALL"
    words = [bwrap, *spaces.split(), "--new-session", "--die-with-parent", "--seccomp", str(filter_descriptor)]
    words += ["--ro-bind", str(scripts), SCRIPTS]
    for path in _system_folders():
        target = os.readlink(path) if os.path.islink(path) else None
        words += ["--symlink", target, path] if target else ["--ro-bind", path, path]
    words += ["--perms", "1777", "--size", str(memory_bytes), "--tmpfs", "/tmp"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives", *python_folders()):
        for parent in _parents(path):
            words += ["--perms", "0755", "--dir", parent]
        words += ["--ro-bind-try", path, path]
    # Anybody may write /proc/pressure, which starts threads of the kernel.
    words += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    words += ["--ro-bind-try", "/proc/pressure", "/proc/pressure"]
    # Hides bubblewrap's first process, which has no limits: its memory is open to programs of the same user.
    words += ["--perms", "0555", "--size", "4096", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(SHARED_BYTES), "--tmpfs", "/dev/shm"]
    return [*words, "--chdir", "/tmp", "--remount-ro", "/dev", "--remount-ro", "/"]


def python_folders() -> list[str]:
    """The interpreter, its library and the packages; nothing else of the folders that contain them."""
    interpreter = os.path.dirname(os.path.realpath(sys.executable))
    return [interpreter, f"{sys.base_prefix}/lib", *site.getsitepackages()]


def _system_folders() -> list[str]:
    return [path for path in ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64") if os.path.lexists(path)]


def _parents(path: str) -> list[str]:
    """The folders above ``path`` that bubblewrap must create, outermost first."""
    folders, path = [], os.path.dirname(path)
    while path not in ("/", "/usr", "/tmp") and not path.startswith("/usr/"):
        folders.insert(0, path)
        path = os.path.dirname(path)
    return folders


@cache
def system_call_filter() -> bytes:
    """A program of classic BPF for ``bwrap --seccomp``; empty on machines whose system calls are not known here."""
    if platform.machine() not in _MACHINES:
        return b""
    audit, socket, socketpair, clone = _MACHINES[platform.machine()]
    index = list(_MACHINES).index(platform.machine())
    load, equal, at_least, any_bit, leave = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    words = [(load, 0, 0, 4), (equal, 1, 0, audit), (leave, 0, 0, kill), (load, 0, 0, 0)]

    def refuse(number: int, error: int) -> tuple[tuple[int, ...], ...]:
        return (equal, 0, 1, number), (leave, 0, 0, 0x00050000 | error)

    if index == 0:
        words += [(at_least, 0, 1, _X32), (leave, 0, 0, 0x00050000 | errno.ENOSYS)]
    for numbers in _FORBIDDEN.values():
        words += refuse(numbers[index], errno.EPERM)
    words += refuse(_CLONE3, errno.ENOSYS)  # its flags lie in memory; libraries then use clone
    words += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES)]
    words += [(leave, 0, 0, 0x00050000 | errno.EPERM)]
    for number in (socket, socketpair):
        words += [(load, 0, 0, 0), (equal, 0, 3, number), (load, 0, 0, 16), (equal, 1, 0, _AF_UNIX)]
        words += [(leave, 0, 0, 0x00050000 | errno.EAFNOSUPPORT)]
    words += [(leave, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *word) for word in words)
