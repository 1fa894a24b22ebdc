"""Wraps the Linux system calls that confine processes: namespaces, mounts, capabilities, Landlock, death signals."""

import ctypes
import os
import struct
from contextlib import suppress

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NETWORK = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
_MS_READ_ONLY, _MS_NO_SUID, _MS_NO_DEV, _MS_NO_EXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_MOUNT_OPTIONS = {
    "nosuid": _MS_NO_SUID, "nodev": _MS_NO_DEV, "noexec": _MS_NO_EXEC, "noatime": 1024, "nodiratime": 2048,
    "relatime": 1 << 21,
}  # fmt: skip
_SET_DEATH_SIGNAL, _SET_DUMPABLE, _DROP_FROM_BOUNDS, _SET_SUBREAPER, _SET_NO_NEW_PRIVILEGES = 1, 4, 24, 36, 38
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_AT_CURRENT, _AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = -100, 0x8000, 1
_CAPABILITIES_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name, *arguments):
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags):
    """Enter new namespaces."""
    _call("unshare", flags)


def enter_user_namespace(flags):
    """Enter a new user namespace and others as the same user, who owns the same files and cannot become another."""
    user, group = os.geteuid(), os.getegid()
    unshare(NEW_USER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount_tmpfs(path, size, mode="700"):
    """Mount an empty folder in memory at ``path``."""
    options = f"size={size},nr_inodes=4096,mode={mode}"
    _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", _MS_NO_SUID | _MS_NO_DEV, options.encode())


def mount_proc():
    """Mount /proc of this process namespace. Some containers forbid it; other processes' memory is protected anyway."""
    _call("mount", b"proc", b"/proc", b"proc", _MS_NO_SUID | _MS_NO_DEV | _MS_NO_EXEC, None)


def bind(descriptor, path):
    """Make the open folder visible at ``path``."""
    _call("mount", f"/proc/self/fd/{descriptor}".encode(), os.fsencode(path), None, _MS_BIND | _MS_REC, None)


def keep_mounts_private():
    """Keep later mounts in this namespace."""
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def make_read_only(writable):
    """Make all mounts read-only except those in ``writable``."""
    try:
        attributes = struct.pack("=4Q", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, _AT_CURRENT, b"/", _AT_RECURSIVE, attributes, len(attributes))
        attributes = struct.pack("=4Q", 0, _ATTRIBUTE_READ_ONLY, 0, 0)
        for path in writable:
            _call("syscall", _MOUNT_SETATTR, _AT_CURRENT, os.fsencode(path), 0, attributes, len(attributes))
    except OSError:
        _remount_read_only(writable)  # kernels before 5.12


def _remount_read_only(writable):
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounts = [(fields[4], fields[5]) for fields in map(str.split, file)]
    for path, options in mounts:
        target = path.encode("utf-8", "surrogateescape").decode("unicode_escape")  # a blank is written \040
        if target in writable:
            continue
        flags = sum(_MOUNT_OPTIONS.get(option, 0) for option in options.split(","))
        try:
            os.statvfs(target)
            _call("mount", None, os.fsencode(target), None, _MS_REMOUNT | _MS_BIND | _MS_READ_ONLY | flags, None)
        except (FileNotFoundError, PermissionError):
            continue  # hidden by another mount, so out of reach


def drop_privileges():
    """Drop all capabilities for good; programs with the set-user-id bit do not restore them."""
    _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for capability in range(64):
        with suppress(OSError):
            _call("prctl", _DROP_FROM_BOUNDS, capability, 0, 0, 0)
    _call("capset", struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0), bytes(24))


def set_dumpable(value):
    """Set whether other processes of the user may read the memory and descriptors of this one."""
    _call("prctl", _SET_DUMPABLE, int(value), 0, 0, 0)


def die_with_parent(signal_number, parent=None):
    """Send ``signal_number`` to this process when its parent ends; ``parent`` closes the gap before this call."""
    _call("prctl", _SET_DEATH_SIGNAL, signal_number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def adopt_descendants():
    """Become the parent of descendants whose own parent ends."""
    _call("prctl", _SET_SUBREAPER, 1, 0, 0, 0)


def landlock_version():
    """Version of Landlock; 0 if the kernel does not have or use it."""
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, 0, 1))


def restrict_with_landlock(folder):
    """Allow writes only below ``folder`` and to /dev/null; no TCP from version 4 on, no signals to others from 6 on."""
    version = landlock_version()
    # Writing, removing and creating files; moving between folders from version 2 on, truncating from 3 on.
    write = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12) + ((13,) if version > 1 else ()))
    write |= (1 << 14) if version > 2 else 0
    attributes = struct.pack("=3Q", write, 0b11 if version > 3 else 0, 0b11 if version > 5 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = _call("syscall", _LANDLOCK_CREATE, attributes, size, 0)
    try:
        for path, access in ((folder, write), ("/dev/null", write & (1 << 1 | 1 << 14))):
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                _call("syscall", _LANDLOCK_ADD, rules, 1, struct.pack("=Qi", access, opened), 0)
            finally:
                os.close(opened)
        _call("prctl", _SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call("syscall", _LANDLOCK_RESTRICT, rules, 0)
    finally:
        os.close(rules)


def children(pid):
    """Processes whose parent is ``pid``."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    except FileNotFoundError:
        return found if os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children") else _scan_children(pid)
    except OSError:
        pass
    return found


def _scan_children(pid):
    """Like ``children``, for kernels without the list of children."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError), open(f"/proc/{name}/stat") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == pid:
                found.append(int(name))
    return found


def descendants(pid):
    found, open_ = [], [pid]
    while open_:
        new = children(open_.pop())
        found += new
        open_ += new
    return found


def usage(pids):
    """Number of processes and threads of ``pids``, and their resident memory in bytes."""
    tasks = memory = 0
    for pid in pids:
        with suppress(OSError):
            tasks += len(os.listdir(f"/proc/{pid}/task"))
            with open(f"/proc/{pid}/statm") as file:
                memory += int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return tasks, memory
