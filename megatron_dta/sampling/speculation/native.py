"""The suffix forest in C, compiled on first use and loaded with ``ctypes``.

``suffix_forest.c`` needs only the C library, so a compiler (``$CC``, else ``cc``, ``gcc`` or ``clang``) builds it in
about a second. The result is kept in ``$MEGATRON_DTA_CACHE`` (default: ``megatron_dta`` in the user's cache folder)
under a name with the source's hash, unless others may write there. It is renamed into place, so several processes may
build it at once. If this fails,
``create_forest`` logs the reason once and uses the Python implementation.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from megatron_dta.common.trust import refuse_foreign
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.speculation.suffix_forest import DraftParams, Drafts, PythonSuffixForest, SuffixForest

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("suffix_forest.c")
HEADER = SOURCE.with_name("suffix_nodes.h")
# Without contraction to fused multiply-add, scores are rounded as in Python.
FLAGS = ("-O2", "-std=c11", "-shared", "-fPIC", "-ffp-contract=off")
COMPILE_SECONDS = 120

_POINTER, _UINT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int32, ctypes.c_double
_SIGNATURES = {
    "sf_new": (_POINTER, [_INT, _INT]),
    "sf_delete": (None, [_POINTER]),
    "sf_new_tree": (_UINT, [_POINTER]),
    "sf_delete_tree": (_INT, [_POINTER, _UINT]),
    "sf_new_text": (_UINT, [_POINTER, _UINT, _UINT, _UINT]),
    "sf_extend": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _POINTER]),
    "sf_finish": (_INT, [_POINTER, _UINT]),
    "sf_remove": (_INT, [_POINTER, _UINT]),
    "sf_draft": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _INT, *[_DOUBLE] * 3, *[_POINTER] * 7]),
    "sf_tokens": (_POINTER, [_POINTER, _UINT, _POINTER]),
    "sf_count": (ctypes.c_int64, [_POINTER, _UINT, _INT, _POINTER]),
    "sf_size": (None, [_POINTER, _POINTER]),
}


class NativeUnavailable(RuntimeError):  # noqa: N818 (a state of the machine, not an error of the program)
    """The C implementation is not available on this machine; the message says why."""


def create_forest(depth: int, early_depth: int | None = None) -> SuffixForest:
    """The fastest forest that works on this machine."""
    forest = NativeSuffixForest if _why_not_native() is None else PythonSuffixForest
    return forest(depth, early_depth)


@functools.cache
def _why_not_native() -> str | None:
    try:
        load_library()
    except NativeUnavailable as error:
        logger.warning("drafting in plain Python, about twenty times slower: %s", error)
        return str(error)
    return None


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled library; raises ``NativeUnavailable`` if there is no compiler or it fails."""
    source = SOURCE.read_bytes() + HEADER.read_bytes()
    key = hashlib.sha256(b"\0".join([source, " ".join(FLAGS).encode(), platform.machine().encode()])).hexdigest()[:16]
    name = f"suffix_forest-{key}.so"
    for folder in (_cache_folder(), None):
        try:
            if folder is None:  # the cache cannot be written, or its files cannot be mapped for execution
                with tempfile.TemporaryDirectory(prefix="megatron_dta-") as temporary:
                    return _load(_compile(Path(temporary) / name))
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / name
            refuse_foreign((folder, path), "the library is compiled anew; set MEGATRON_DTA_CACHE to a folder of yours")
            return _load(path if path.exists() else _compile(path))
        except InputError as error:
            logger.warning("%s", error)
        except OSError as error:
            failure = error
    raise NativeUnavailable(f"the compiled suffix forest cannot be stored or loaded: {failure}")


def _cache_folder() -> Path:
    given = os.environ.get("MEGATRON_DTA_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_dta"


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CC", ""))
    for candidate in [given] if given else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(candidate[0]):
            return candidate
    raise NativeUnavailable(f"no C compiler found ({' '.join(given) or 'cc, gcc, clang'}); install one or set CC")


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
            raise NativeUnavailable(f"{command[0]} failed: {lines[0]}")
        os.replace(temporary, path)
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(f"{command[0]} took more than {COMPILE_SECONDS} seconds") from None
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


class NativeSuffixForest(SuffixForest):
    """The forest in C; not thread-safe."""

    def __init__(self, depth: int, early_depth: int | None = None) -> None:
        super().__init__(depth, early_depth)
        self._library = load_library()
        self._forest = self._library.sf_new(self.depth, self.early_depth)
        if not self._forest:
            raise MemoryError("no memory for a suffix forest")

    def __del__(self) -> None:
        if getattr(self, "_forest", None):
            self._library.sf_delete(self._forest)
            self._forest = None

    def new_tree(self) -> int:
        return _checked(self._library.sf_new_tree(self._forest))

    def delete_tree(self, tree: int) -> None:
        if self._library.sf_delete_tree(self._forest, tree):
            raise ValueError(f"tree {tree} still has texts")

    def new_text(self, trees: tuple[int, int], begin: int = 0) -> int:
        return _checked(self._library.sf_new_text(self._forest, trees[0], trees[1], begin))

    def extend(self, texts: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        texts, tokens = np.ascontiguousarray(texts, np.uint32), np.ascontiguousarray(tokens, np.int32)
        offsets = np.ascontiguousarray(offsets, np.int64)
        _check_status(
            self._library.sf_extend(
                self._forest, len(texts), texts.ctypes.data, tokens.ctypes.data, offsets.ctypes.data
            )
        )

    def finish(self, text: int) -> None:
        _check_status(self._library.sf_finish(self._forest, text))

    def remove(self, text: int) -> None:
        if self._library.sf_remove(self._forest, text):
            raise RuntimeError(f"text {text} is not in its trees: the forest is damaged")

    def draft(self, texts: np.ndarray, most: np.ndarray, params: DraftParams) -> Drafts:
        texts, most = np.ascontiguousarray(texts, np.uint32), np.ascontiguousarray(most, np.int32)
        drafts = Drafts.empty(len(texts), params.width)
        outputs = (drafts.tokens, drafts.probabilities, drafts.lengths, drafts.matches, drafts.trees)
        outputs += (drafts.supports, drafts.scores)
        status = self._library.sf_draft(
            self._forest,
            len(texts),
            texts.ctypes.data,
            most.ctypes.data,
            params.width,
            params.factor,
            params.offset,
            params.min_probability,
            *(output.ctypes.data for output in outputs),
        )
        _check_status(status)
        return drafts

    def count(self, tree: int, pattern: np.ndarray) -> int:
        pattern = np.ascontiguousarray(pattern, np.int32)
        return self._library.sf_count(self._forest, tree, len(pattern), pattern.ctypes.data)

    def tokens(self, text: int) -> np.ndarray:
        length = ctypes.c_int64()
        address = self._library.sf_tokens(self._forest, text, ctypes.byref(length))
        if not length.value:
            return np.zeros(0, np.int32)
        return np.ctypeslib.as_array((ctypes.c_int32 * length.value).from_address(address)).copy()

    @property
    def num_nodes(self) -> int:
        return self._size()[0]

    @property
    def num_bytes(self) -> int:
        return self._size()[1]

    def _size(self) -> tuple[int, int]:
        size = np.zeros(2, np.int64)
        self._library.sf_size(self._forest, size.ctypes.data)
        return int(size[0]), int(size[1])


def _checked(number: int) -> int:
    if not number:
        raise MemoryError("no memory for the suffix forest; lower --das-max-tokens")
    return number


def _check_status(status: int) -> None:
    if status:
        raise MemoryError("no memory for the suffix forest; lower --das-max-tokens")
