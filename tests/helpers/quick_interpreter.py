"""Triton's interpreter without what it repeats: it patches its language anew at every launch and every inner call, and
builds a table of dtypes at every access. A third of its time is that.
"""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None:
        pass


def make_quick() -> None:
    """The language stays patched in this process, which compiles no kernels."""
    patch_lang, patched = interpreter._patch_lang, set()
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def patch_once(function: object) -> _Nothing:
        visible = frozenset(name for name, value in function.__globals__.items() if value is tl or value is tl.core)
        if visible not in patched:
            patch_lang(function)
            patched.add(visible)
        return _Nothing()

    def find_once(dtype: tl.dtype) -> np.dtype:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        key = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if key not in dtypes:
            dtypes[key] = find_dtype(dtype)
        return dtypes[key]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, find_once
