"""Launch settings of flash-linear-attention's kernels, from a fixed table instead of its tuner.

The tuner compiles all candidates of every kernel at the first step, which takes minutes, and picks by time, so another
run may add in another order. The settings here are used on Hopper GPUs for the heads in
``HOPPER``, those of the published models with gated delta net and of Nemotron 3; elsewhere the tuner decides.
``benchmarks/layers/recurrence.py --tune`` shows what it picks; enter that here.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

CAPABILITY = 9
# Modules of the kernels that a call runs; all of them are tuned by the shapes of heads alone.
_MODULES = ("common.chunk_delta_h", "common.chunk_o", "gated_delta_rule.chunk_fwd", "gated_delta_rule.wy_fast")
_MODULES += ("utils.cumsum",)


class LaunchSettings(NamedTuple):
    """What the tuner chooses for a kernel: warps, stages of its pipeline and tile sizes."""

    num_warps: int
    num_stages: int
    tiles: dict[str, int]


# By the kernel's name: fla-core 0.6.0, Triton 3.6, an H200, 16 key heads and 32 value heads, 2,048 tokens.
_DELTA = {
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": LaunchSettings(4, 4, {"BV": 32}),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": LaunchSettings(4, 3, {"BV": 32}),
    "chunk_fwd_kernel_o": LaunchSettings(4, 3, {"BK": 64, "BV": 64}),
    "chunk_bwd_kernel_dv_local": LaunchSettings(2, 3, {}),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": LaunchSettings(1, 3, {"BK": 64}),
    "recompute_w_u_fwd_kernel": LaunchSettings(4, 3, {}),
    "prepare_wy_repr_bwd_kernel": LaunchSettings(4, 3, {}),
    "chunk_local_cumsum_scalar_kernel": LaunchSettings(4, 3, {}),
}
# What an H100 picked for Mamba-2 with 8 groups and 64 heads, but for the sums of decays, which take no time.
_MAMBA = _DELTA | {"chunk_bwd_kernel_dv_local": LaunchSettings(4, 2, {})}
# By the channels of keys and of values.
HOPPER: dict[tuple[int, int], dict[str, LaunchSettings]] = {(128, 128): _DELTA, (128, 64): _MAMBA}
# The assembler of Triton 3.6 and 3.7.1 (ptxas 12.8) compiles this kernel wrongly for Hopper with four warps and so few
# channels of values: it takes the address of a product's operand in shared memory from a register that nothing has
# written. Gradients are then wrong, or the access is illegal. With two warps the code is right.
_WRONG_WITH_FOUR_WARPS, _CHANNELS_OF_WRONG = "chunk_bwd_kernel_dv_local", 32


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


@lru_cache
def _all_candidates() -> dict[str, list[Any]]:
    """The candidates of each tuner."""
    return {name: tuner.configs for name, tuner in tuners().items()}


@lru_cache(maxsize=1)
def fix_settings(head_sizes: tuple[int, int], capability: tuple[int, int]) -> None:
    """Leave each tuner the candidate that is chosen for these heads, with which it does not tune; else all of them.

    The tuners are those of the process, so this is called before every use: other heads may find no room for the
    same settings. A candidate that this version of the library does not have is left to its tuner.
    """
    on_hopper = capability[0] == CAPABILITY
    chosen = HOPPER.get(head_sizes, {}) if on_hopper else {}
    for name, tuner in tuners().items():
        candidates = _all_candidates()[name]
        if name == _WRONG_WITH_FOUR_WARPS and on_hopper and head_sizes[1] <= _CHANNELS_OF_WRONG:
            candidates = [config for config in candidates if config.num_warps < 4]
        tuner.configs = [config for config in candidates if settings_of(config) == chosen.get(name)] or candidates


def settings_of(config: Any) -> LaunchSettings:
    """The settings of a candidate (``triton.Config``)."""
    return LaunchSettings(config.num_warps, config.num_stages, dict(config.kwargs))
