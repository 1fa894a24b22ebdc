"""The suffix forest in C, compiled on first use and loaded with ``ctypes``.

``suffix_forest.c`` needs only the C library, so a compiler (``$CC``, else ``cc``, ``gcc`` or ``clang``) builds it in
about a second. The result is kept in ``$MEGATRON_DTA_CACHE`` (default: ``megatron_dta`` in the user's cache folder)
under a name with the source's hash; a folder that others may write is refused. It is renamed into place, so several
processes may build it at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from megatron_dta.common.trust import refuse_foreign
from megatron_dta.core.common.errors import InputError

SOURCE = Path(__file__).with_name("suffix_forest.c")
HEADER = SOURCE.with_name("suffix_nodes.h")
# Without contraction to fused multiply-add, all machines round scores alike.
FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")
COMPILE_SECONDS = 120

_POINTER, _UINT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32, ctypes.c_double
_SIGNATURES = {
    "sf_new": (_POINTER, [_INT, _INT]),
    "sf_delete": (None, [_POINTER]),
    "sf_new_tree": (_UINT, [_POINTER]),
    "sf_delete_tree": (_INT, [_POINTER, _UINT]),
    "sf_new_text": (_UINT, [_POINTER, _UINT, _UINT, _UINT]),
    "sf_extend": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT]),
    "sf_finish": (_INT, [_POINTER, _UINT]),
    "sf_remove": (_INT, [_POINTER, _UINT]),
    "sf_draft": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _INT, *[_DOUBLE] * 3, *[_POINTER] * 5]),
    "sf_accept": (None, [*[_INT] * 3, *[_POINTER] * 7]),
    "sf_learn": (None, [*[_INT] * 2, *[_POINTER] * 9]),
    "sf_gate": (None, [*[_INT] * 2, *[_POINTER] * 3, ctypes.c_int64, *[_POINTER] * 2]),
    "sf_tokens": (_POINTER, [_POINTER, _UINT, _POINTER]),
    "sf_count": (ctypes.c_int64, [_POINTER, _UINT, _INT, _POINTER]),
    "sf_size": (None, [_POINTER, _POINTER]),
}


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library; raises ``InputError`` if there is no compiler or it fails."""
    source = SOURCE.read_bytes() + HEADER.read_bytes()
    key = hashlib.sha256(b"\0".join([source, " ".join(FLAGS).encode(), platform.machine().encode()])).hexdigest()[:16]
    name = f"suffix_forest-{key}.so"
    folder = _cache_folder()
    path, mend = folder / name, "set MEGATRON_DTA_CACHE to a folder of yours"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_foreign((folder, path), mend)
        return _load(path if path.exists() else _compile(path))
    except OSError as error:
        raise InputError(f"{folder}: the compiled suffix forest cannot be stored or loaded; {mend}: {error}") from error


def _cache_folder() -> Path:
    folder = os.environ.get("MEGATRON_DTA_CACHE")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dta"


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC", ""))
    for candidate in [command] if command else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise InputError(
        f"drafts need a C compiler, and none was found ({' '.join(command) or 'cc, gcc, clang'}); install one or set CC"
    )


def _compile(path: Path) -> Path:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".suffix_forest-", suffix=".so")
    os.close(descriptor)
    try:
        command = [*_compiler(), *FLAGS, "-o", temporary, str(SOURCE)]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise InputError(f"drafts need a C compiler, and {command[0]} failed: {lines[0]}")
        os.replace(temporary, path)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"drafts need a C compiler, and {command[0]} took more than {COMPILE_SECONDS} seconds"
        ) from None
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return path


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
