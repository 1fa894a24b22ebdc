"""The gated delta rule and Mamba-2 by flash-linear-attention (package ``fla-core``), on GPUs, in 16 bits.

Its kernels take the chunks of all runs in one call, with an entry state for each run, and give the gradients of the
entries. Version 0.6.0 is the first that was tried here; older ones are refused. On Hopper GPUs some versions of Triton
compile its backward wrongly, and the package refuses them unless TileLang is there (its issue 640).
"""

from __future__ import annotations

import re
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
    triton = version("triton")
    if capability[0] != 9 or not _WRONG_TRITON <= _numbers(triton) < _RIGHT_TRITON:
        return None
    has_tilelang = find_spec("tilelang")
    if has_tilelang and _has_compiler():
        return None
    missing = "a CUDA toolkit with nvcc for tilelang" if has_tilelang else "tilelang"
    return f"Triton {triton} compiles its backward wrongly for Hopper GPUs; install {missing}, or triton>=3.7.1"


def _has_compiler() -> bool:
    """Whether the package finds the compiler without which it leaves TileLang aside."""
    import fla.utils

    has_nvcc = getattr(fla.utils, "has_usable_nvcc", None)
    return has_nvcc is None or has_nvcc()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _prepare(keys: Tensor, values: Tensor) -> None:
    """Fix the settings of the kernels where they are known."""
    head_sizes = keys.shape[-1], values.shape[-1]
    library_settings.fix_settings(head_sizes, torch.cuda.get_device_capability(keys.device))


def _pieces(runs: Runs) -> dict[str, object]:
    """The chunks of the runs as the library takes them."""
    return dict(cu_seqlens=runs.on_device, chunk_indices=runs.chunks, chunk_size=CHUNK)


def gated_delta_rule(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """``(output [T, J, V], exits [R, J, K, V])``; arguments as in ``gated_delta_rule.gated_delta_rule``."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from dta_kernels.recurrence.head_norms import unit_heads

    q, k, v, g, beta = inputs
    _prepare(k, v)
    q, k = unit_heads(q), unit_heads(k)
    q, k, v, g, beta = (x.unsqueeze(0) for x in (q, k, v, g, beta))
    output, exits = chunk_gated_delta_rule(
        q, k, v, g=g, beta=beta, initial_state=entry_RJKV, output_final_state=True, **_pieces(runs)
    )
    return output.squeeze(0), exits


def state_space(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """The same for Mamba-2; arguments as in ``gated_delta_rule.state_space``."""
    return _StateSpace.apply(*(x.contiguous() for x in (*inputs, entry_RJKV)), runs)


class _StateSpace(torch.autograd.Function):
    """The library's kernels of the gated delta rule with nothing to correct, ``w`` = 0.

    Its own ``simple_gla`` keeps states in float32, which its backward for Hopper GPUs by TileLang does not take, waits
    for the device, and needs as many keys as values.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, g: Tensor, entry: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
        from fla.ops.common.chunk_o import chunk_fwd_o
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        pieces = _pieces(runs)
        total = chunk_local_cumsum(g.unsqueeze(0), scale=RCP_LN2, **pieces)
        h, exits = _chunk_states(k, v, total, entry, pieces)
        ctx.save_for_backward(q, k, v, total, entry)
        ctx.pieces, ctx.dtype = pieces, g.dtype
        return chunk_fwd_o(q=q, k=k, v=v, h=h, g=total, scale=1.0, **pieces).squeeze(0), exits

    @staticmethod
    def backward(ctx, grad: Tensor, grad_exits: Tensor) -> tuple:
        from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu
        from fla.ops.common.chunk_o import chunk_bwd_dqkwg, chunk_bwd_dv_local
        from fla.ops.utils import chunk_local_cumsum

        (q, k, v, total, entry), pieces = ctx.saved_tensors, ctx.pieces
        grad, common = grad.contiguous().unsqueeze(0), dict(g=total, scale=1.0, **pieces)
        h, _ = _chunk_states(k, v, total, entry, pieces)
        dv = chunk_bwd_dv_local(q=q, k=k, do=grad, **common)
        zero = k.new_zeros(*v.shape[:3], k.shape[3])
        dh, grad_entry, dv = chunk_gated_delta_rule_bwd_dhu(
            q=q, k=k, w=zero, do=grad, dv=dv, h0=entry, dht=grad_exits.contiguous(), **common
        )
        dq, dk, _, dg = chunk_bwd_dqkwg(q=q, k=k, v=v, do=grad, h=h, dh=dh, **common)
        dg = chunk_local_cumsum(dg, reverse=True, **pieces).to(ctx.dtype)
        return *(x.squeeze(0) for x in (dq.to(q.dtype), dk.to(k.dtype), dv, dg)), grad_entry, None


def _chunk_states(k: Tensor, v: Tensor, total: Tensor, entry: Tensor, pieces: dict) -> tuple[Tensor, Tensor]:
    """States before each chunk, in 16 bits, and after each run."""
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    _prepare(k, v)
    zero = k.new_zeros(*v.shape[:3], k.shape[3])  # [1, T, J, K]
    h, _, exits = chunk_gated_delta_rule_fwd_h(
        k=k, w=zero, u=v, g=total, initial_state=entry, output_final_state=True, save_new_value=False, **pieces
    )
    return h, exits
