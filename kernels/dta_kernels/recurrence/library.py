"""The gated delta rule and Mamba-2 by flash-linear-attention (package ``fla-core``), on GPUs, in 16 bits.

Its kernels take the chunks of all runs in one call, with an entry state for each run, and give the gradients of the
entries. Version 0.6.0 is the first that was tried here; older ones are refused. On Hopper GPUs some versions of Triton
compile its backward wrongly, and the package refuses them unless TileLang is there (its issue 640).
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from dta_kernels.recurrence import library_settings
from dta_kernels.recurrence.contract import CHUNK, Runs

PACKAGE, OLDEST = "fla-core", (0, 6, 0)
# Versions of Triton, the first and the one after the last, whose code for Hopper is wrong.
_WRONG_TRITON, _RIGHT_TRITON = (3, 4, 0), (3, 7, 1)
DTYPES = (torch.bfloat16, torch.float16)


def installed_version() -> str | None:
    """Version of the package; None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def is_supported(version: str) -> bool:
    """Whether a version is new enough; development versions count as the release that they precede."""
    return _numbers(version) >= OLDEST


def why_triton_is_wrong(capability: tuple[int, int]) -> str | None:
    """Why the kernels' gradients would be wrong on a GPU of this compute capability, and what helps; None if not."""
    version = _triton_version()
    if capability[0] != 9 or not _WRONG_TRITON <= _numbers(version) < _RIGHT_TRITON:
        return None
    has_tilelang = find_spec("tilelang")
    if has_tilelang and _has_compiler():
        return None
    missing = "a CUDA toolkit with nvcc for tilelang" if has_tilelang else "tilelang"
    return f"Triton {version} compiles its backward wrongly for Hopper GPUs; install {missing}, or triton>=3.7.1"


def _has_compiler() -> bool:
    """Whether the package finds the compiler without which it leaves TileLang aside."""
    import fla.utils

    has_nvcc = getattr(fla.utils, "has_usable_nvcc", None)
    return has_nvcc is None or has_nvcc()


def _triton_version() -> str:
    return version("triton")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


@lru_cache
def _prepare(head_sizes: tuple[int, int], capability: tuple[int, int]) -> None:
    """Fix the settings of the kernels where they are known."""
    if capability[0] == library_settings.CAPABILITY and set(head_sizes) == {library_settings.HEAD_SIZE}:
        library_settings.fix_settings(library_settings.HOPPER)


def gated_delta_rule(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """``(output [T, J, V], exits [R, J, K, V])``; arguments as in ``gated_delta_rule.gated_delta_rule``."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from dta_kernels.recurrence.head_norms import unit_heads

    q, k, v, g, beta = inputs
    _prepare((k.shape[2], v.shape[2]), torch.cuda.get_device_capability(q.device))
    q, k = unit_heads(q), unit_heads(k)
    output, exits = chunk_gated_delta_rule(
        *(x.unsqueeze(0) for x in (q, k, v)),
        g=g.unsqueeze(0),
        beta=beta.unsqueeze(0),
        initial_state=entry_RJKV,
        output_final_state=True,
        cu_seqlens=runs.on_device,
        chunk_indices=runs.chunks,
        chunk_size=CHUNK,
    )
    return output.squeeze(0), exits


def state_space(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """The same for Mamba-2; arguments as in ``gated_delta_rule.state_space``."""
    from fla.ops.simple_gla import chunk_simple_gla

    q, k, v, g = inputs
    # Its gradients are those of as many keys as values.
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    output, exits = chunk_simple_gla(
        *(x.unsqueeze(0) for x in (q, k, v, g)),
        scale=1.0,
        initial_state=entry_RJKV,
        output_final_state=True,
        cu_seqlens=runs.on_device,
        cu_seqlens_cpu=torch.tensor(runs.offsets),
    )
    return output.squeeze(0), exits
