"""The sizes of Mamba-2, under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.recurrence import RecurrentMixer


@dataclass(frozen=True)
class Sizes(RecurrentMixer):
    """Sizes of the heads, of their states, and of the convolution. Heads of a group share B and C and a norm."""

    kind: ClassVar[str] = "mamba2"
    filtered: ClassVar[tuple[str, ...]] = ("x", "B", "C")
    of_heads: ClassVar[tuple[str, ...]] = ("dt",)
    head_vectors: ClassVar[tuple[str, ...]] = ("dt_bias", "A_log", "D")
    has_filter_bias: ClassVar[bool] = True
    scales_values: ClassVar[bool] = True
    passes: ClassVar[int] = 2

    mamba_num_heads: int = 128
    mamba_head_dim: int = 64
    mamba_state_dim: int = 128
    mamba_num_groups: int = 8
    mamba_conv_kernel: int = 4

    @property
    def sections(self) -> dict[str, int]:
        width, keys = self.mamba_num_heads * self.mamba_head_dim, self.mamba_num_groups * self.mamba_state_dim
        return {"z": width, "x": width, "B": keys, "C": keys, "dt": self.mamba_num_heads}

    @property
    def divided_heads(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("mamba_num_groups", "mamba_num_heads")}

    @property
    def num_heads(self) -> int:
        return self.mamba_num_heads

    @property
    def head_state(self) -> tuple[int, int]:
        return self.mamba_state_dim, self.mamba_head_dim

    @property
    def conv_width(self) -> int:
        return self.mamba_conv_kernel

    @property
    def norm_width(self) -> int:
        return self.value_width

    def check(self, model: Any, parallel: Any) -> None:
        heads, groups = self.mamba_num_heads, self.mamba_num_groups
        if heads % groups:
            raise InputError(f"mamba_num_heads {heads} is not a multiple of mamba_num_groups {groups}; change one")
        if model.normalization != "RMSNorm" or not model.disable_bias_linear:
            raise InputError("mamba2 needs --normalization RMSNorm and --disable-bias-linear")
