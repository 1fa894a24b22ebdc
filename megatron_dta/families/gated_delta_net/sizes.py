"""The sizes of gated delta net, under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.recurrence import RecurrentMixer


@dataclass(frozen=True)
class Sizes(RecurrentMixer):
    """Sizes of the convolution and of the heads of keys (and queries) and values."""

    kind: ClassVar[str] = "gated_delta_net"
    filtered: ClassVar[tuple[str, ...]] = ("query", "key", "value")
    of_heads: ClassVar[tuple[str, ...]] = ("beta", "alpha")
    head_vectors: ClassVar[tuple[str, ...]] = ("dt_bias", "A_log")
    passes: ClassVar[int] = 3

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @property
    def sections(self) -> dict[str, int]:
        keys, heads = self.linear_num_key_heads * self.linear_key_head_dim, self.linear_num_value_heads
        values = heads * self.linear_value_head_dim
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    @property
    def divided_heads(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("linear_num_key_heads", "linear_num_value_heads")}

    @property
    def num_heads(self) -> int:
        return self.linear_num_value_heads

    @property
    def head_state(self) -> tuple[int, int]:
        return self.linear_key_head_dim, self.linear_value_head_dim

    @property
    def conv_width(self) -> int:
        return self.linear_conv_kernel_dim

    def check(self, model: Any, parallel: Any) -> None:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise InputError(
                f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}; change one of them"
            )
        if not (model.swiglu and model.normalization == "RMSNorm" and model.disable_bias_linear):
            raise InputError("gated_delta_net needs --swiglu, --normalization RMSNorm and --disable-bias-linear")
