"""The gated delta rule by flash-linear-attention (package ``fla-core``), on GPUs, in 16 bits.

Its kernels take the chunks of all runs in one call, with an entry state for each run, and give the gradients of the
entries. Version 0.6.0 is the first that was tried here; older ones are refused.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from dta_kernels.recurrence.contract import CHUNK, Runs

PACKAGE, OLDEST = "fla-core", (0, 6, 0)
DTYPES = (torch.bfloat16, torch.float16)


def installed_version() -> str | None:
    """Version of the package; None if it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def is_supported(found: str) -> bool:
    """Whether a version is new enough; development versions count as the release that they precede."""
    numbers = [int(part) for part in re.findall(r"\d+", found)[:3]]
    return tuple(numbers) >= OLDEST


def gated_delta_rule(inputs: tuple[Tensor, ...], entry_RJKV: Tensor, runs: Runs) -> tuple[Tensor, Tensor]:
    """``(output [T, J, V], exits [R, J, K, V])``; arguments as in ``gated_delta_rule.gated_delta_rule``."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v, g, beta = (each.unsqueeze(0) for each in inputs)
    output, exits = chunk_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=entry_RJKV,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=runs.on_device,
        chunk_indices=runs.chunks,
        chunk_size=CHUNK,
    )
    return output.squeeze(0), exits
