"""Refuses files that other users of the machine may have written, where a program believes or runs what they hold."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from megatron_dta.core.common.errors import InputError


def refuse_foreign(paths: Iterable[Path], remedy: str) -> None:
    """Refuse files and folders that anybody but this user and root may write, and what is neither file nor folder.

    Folders around them may belong to anybody, but not every user may rename what they hold.

    Args:
        paths: those that exist are checked.
        remedy: what to do about it, for the message.
    """
    around: set[Path] = set()
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        fault = _fault(status)
        if fault is not None:
            raise InputError(f"{path}: {fault}; {remedy}")
        around.update(path.resolve().parents)
    for folder in sorted(around):
        mode = folder.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise InputError(f"{folder}: every user may replace what it holds; {remedy}")


def _fault(status: os.stat_result) -> str | None:
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return "is neither a file nor a folder"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to another user ({_user(status.st_uid)})"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return "its group may write to it"
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_own_group(gid: int) -> bool:
    """Whether a group has no member but this user, as where every user has a group, or is root's."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return gid == 0
    return gid == 0 or (gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name})


def close_to_others(folder: Path) -> None:
    """Withdraw the right to write to a folder and its files from everybody but their owner."""
    for path in (folder, *folder.iterdir()):
        with suppress(OSError):  # some file systems have no rights to withdraw
            path.chmod(path.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))
