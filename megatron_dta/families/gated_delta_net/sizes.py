"""The sizes of gated delta net, under Megatron's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.mixer import LayerBytes, LayerSizes, Mixer

# Tokens of a chunk of the gated delta rule, at whose begin its kernels store the state.
_CHUNK = 64


@dataclass(frozen=True)
class Sizes(Mixer):
    """Sizes of the convolution and of the heads of keys (and queries) and values."""

    kind: ClassVar[str] = "gated_delta_net"

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32

    @property
    def key_width(self) -> int:
        """Channels of all key heads, which is also that of all query heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def sections(self) -> dict[str, int]:
        """Rows of the sections of the input projection, in Megatron's order."""
        keys, values, heads = self.key_width, self.value_width, self.linear_num_value_heads
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values, which the convolution filters."""
        return 2 * self.key_width + self.value_width

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        return {
            "in_proj": (hidden_size, sum(self.sections.values())),
            "out_proj": (self.value_width, hidden_size),
        }

    @property
    def vectors(self) -> tuple[int, int]:
        divided = self.linear_conv_kernel_dim * self.channels + 2 * self.linear_num_value_heads
        return divided, self.linear_value_head_dim

    @property
    def state(self) -> int:
        return self.value_width * self.linear_key_head_dim

    @property
    def rows(self) -> tuple[int, int]:
        return self.linear_conv_kernel_dim - 1, self.channels

    @property
    def token_operations(self) -> int:
        """A token reads the state twice and updates it once, each a product with a key or query. The convolution is
        added.
        """
        return 6 * self.state + 2 * self.linear_conv_kernel_dim * self.channels

    @property
    def exchanged(self) -> tuple[int, int]:
        return self.channels + 2 * self.linear_num_value_heads, self.value_width

    def heads_refusal(self, tensor: int, context: int) -> str | None:
        for name in ("linear_num_key_heads", "linear_num_value_heads"):
            count = getattr(self, name)
            if count % (tensor * context):
                sizes = (("--tensor-model-parallel-size", tensor), ("--context-parallel-size", context))
                flags = " x ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
                return f"{flags} does not divide {name} {count}; lower it to a divisor of {count}"
        return None

    def check(self, model: Any, parallel: Any) -> None:
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            raise InputError(
                f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}; change one of them"
            )
        if not (model.swiglu and model.normalization == "RMSNorm" and model.disable_bias_linear):
            raise InputError("gated_delta_net needs --swiglu, --normalization RMSNorm and --disable-bias-linear")

    def layer_bytes(self, sizes: LayerSizes, fused: bool) -> LayerBytes:
        """On the kernels it keeps its input, the projected rows, the filtered rows, the output of the rule and the
        gated output, and the rest of the layer the residual stream and what its feed-forward layer keeps. Its backward
        holds the products of the rule's chunks, their gradients and those of the rows.

        Plain modules keep the inputs of each of their operations. The rule in plain PyTorch holds about ten matrices of
        a chunk's tokens by its tokens for each head. Runs that are shorter than the chunks of their level need as much
        as full chunks, which is not counted.
        """
        element_bytes, tensor_size, hidden, ffn = sizes
        widths = self.channels, self.value_width, self.linear_num_value_heads
        channels, values, heads = (width / tensor_size for width in widths)
        keys, chunk_states = heads * self.linear_key_head_dim, self.state / tensor_size / _CHUNK
        rows = channels + values + 2 * heads
        if fused:
            around = 2 * hidden + ffn[0] / element_bytes
            kept = element_bytes * (around + rows + channels + 2 * values) + 28 * heads
            rule = element_bytes * (2 * channels + 5 * keys + 6 * values + 2 * chunk_states + 2 * _CHUNK * heads)
            filters = 8 * channels + element_bytes * 2 * channels
            return LayerBytes(kept, max(rule + element_bytes * rows, filters + element_bytes * rows, ffn[1]))
        accumulator = max(4, element_bytes)
        # The norm computes in float64 unless the model is in 16 bits.
        of_norm = 4 if element_bytes < 4 else 8
        around = (2 * element_bytes + 4 * accumulator) * hidden + ffn[0]
        kept = around + 2 * element_bytes * channels + 6 * of_norm * values + (6 * accumulator + of_norm) * heads
        rule = accumulator * (11 * (_CHUNK * heads + keys) + 6 * values + 4 * chunk_states)
        return LayerBytes(kept + 64, max(rule + 8 * element_bytes * rows, ffn[1]))
