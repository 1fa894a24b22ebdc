"""Launch settings of flash-linear-attention's kernels, from a fixed table instead of its tuner.

The tuner compiles all candidates of every kernel at the first step, which takes minutes, and picks by time, so another
run may add in another order. The settings here are used on Hopper GPUs for heads of 128, the size of the published
models; elsewhere the tuner decides. ``benchmarks/layers/recurrence.py --tune`` shows what it picks; enter that here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

HEAD_SIZE, CAPABILITY = 128, 9
# Modules of the kernels that a call runs; all of them are tuned by the shapes of heads alone.
_MODULES = ("common.chunk_delta_h", "common.chunk_o", "gated_delta_rule.chunk_fwd", "gated_delta_rule.wy_fast")
_MODULES += ("utils.cumsum",)


class LaunchSettings(NamedTuple):
    """What the tuner chooses for a kernel: warps, stages of its pipeline and tile sizes."""

    num_warps: int
    num_stages: int
    tiles: dict[str, int]


# By the kernel's name: fla-core 0.6.0, Triton 3.6, an H200, 16 key heads and 32 value heads, 2,048 tokens.
HOPPER: dict[str, LaunchSettings] = {
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": LaunchSettings(4, 4, {"BV": 32}),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": LaunchSettings(4, 3, {"BV": 32}),
    "chunk_fwd_kernel_o": LaunchSettings(4, 3, {"BK": 64, "BV": 64}),
    "chunk_bwd_kernel_dv_local": LaunchSettings(2, 3, {}),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": LaunchSettings(1, 3, {"BK": 64}),
    "recompute_w_u_fwd_kernel": LaunchSettings(4, 3, {}),
    "prepare_wy_repr_bwd_kernel": LaunchSettings(4, 3, {}),
    "chunk_local_cumsum_scalar_kernel": LaunchSettings(4, 3, {}),
}


def tuners() -> dict[str, Any]:
    """The library's tuners by the names of their kernels."""
    from triton.runtime.autotuner import Autotuner

    autotuners = {}
    for module in _MODULES:
        for name, kernel in vars(import_module(f"fla.ops.{module}")).items():
            while hasattr(kernel, "fn") and not isinstance(kernel, Autotuner):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner):
                autotuners[name] = kernel
    return autotuners


def fix_settings(settings: dict[str, LaunchSettings]) -> None:
    """Leave each tuner in ``settings`` that one candidate, with which it does not tune.

    A candidate that this version of the library does not have is left to its tuner.
    """
    autotuners = tuners()
    for name, chosen in settings.items():
        if name in autotuners:
            tuner = autotuners[name]
            tuner.configs = [config for config in tuner.configs if settings_of(config) == chosen] or tuner.configs


def settings_of(config: Any) -> LaunchSettings:
    """The settings of a candidate (``triton.Config``)."""
    return LaunchSettings(config.num_warps, config.num_stages, dict(config.kwargs))
