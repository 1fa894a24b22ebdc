"""The sizes of layers with a short convolution and a recurrence, whose heads tensor and context ranks divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_dta.core.shapes.mixer import LayerBytes, LayerSizes, Mixer

# Tokens of a chunk of a recurrence, at whose begin its kernels store the state.
_CHUNK = 64


@dataclass(frozen=True)
class RecurrentMixer(Mixer):
    """What ``core.model.hybrid.recurrent_layer`` builds.

    Attributes:
        filtered: sections of the input projection that the convolution filters; adjacent to each other.
        gate: section of the output's gate.
        of_heads: sections with a number for each head.
        head_vectors: parameters with a number for each head.
        has_filter_bias: whether the convolution has a bias.
        scales_values: whether values are what was filtered times a number of the head.
        passes: products of a token with its state: reads, and updates.
    """

    is_recurrent: ClassVar[bool] = True
    filtered: ClassVar[tuple[str, ...]]
    gate: ClassVar[str] = "z"
    of_heads: ClassVar[tuple[str, ...]]
    head_vectors: ClassVar[tuple[str, ...]]
    has_filter_bias: ClassVar[bool] = False
    scales_values: ClassVar[bool] = False
    passes: ClassVar[int]

    @property
    def sections(self) -> dict[str, int]:
        """Rows of the sections of the input projection, in Megatron's order."""
        raise NotImplementedError

    @property
    def divided_heads(self) -> dict[str, int]:
        """Numbers of heads that ranks divide, by setting."""
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        """Heads of the output, with a state each."""
        raise NotImplementedError

    @property
    def head_state(self) -> tuple[int, int]:
        """Size of a key and of a value: the shape of a head's state."""
        raise NotImplementedError

    @property
    def conv_width(self) -> int:
        """Tokens that the convolution sees."""
        raise NotImplementedError

    @property
    def norm_width(self) -> int:
        """Entries of the weight of the output's norm: those of a head that all share, or of all heads."""
        return self.head_state[1]

    @property
    def value_width(self) -> int:
        """Channels of the output."""
        return self.num_heads * self.head_state[1]

    @property
    def channels(self) -> int:
        """Channels that the convolution filters."""
        return sum(self.sections[name] for name in self.filtered)

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        return {"in_proj": (hidden_size, sum(self.sections.values())), "out_proj": (self.value_width, hidden_size)}

    @property
    def vectors(self) -> tuple[int, int]:
        divided = (self.conv_width + self.has_filter_bias) * self.channels + len(self.head_vectors) * self.num_heads
        is_shared = self.norm_width == self.head_state[1]
        return (divided, self.norm_width) if is_shared else (divided + self.norm_width, 0)

    @property
    def state(self) -> int:
        return self.value_width * self.head_state[0]

    @property
    def rows(self) -> tuple[int, int]:
        return self.conv_width - 1, self.channels

    @property
    def token_operations(self) -> int:
        return 2 * self.passes * self.state + 2 * self.conv_width * self.channels

    @property
    def exchanged(self) -> tuple[int, int]:
        return self.channels + len(self.of_heads) * self.num_heads, self.value_width

    def heads_refusal(self, tensor: int, context: int) -> str | None:
        for name, count in self.divided_heads.items():
            if count % (tensor * context):
                sizes = (("--tensor-model-parallel-size", tensor), ("--context-parallel-size", context))
                flags = " x ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
                return f"{flags} does not divide {name} {count}; lower it to a divisor of {count}"
        return None

    def layer_bytes(self, sizes: LayerSizes) -> LayerBytes:
        """It keeps its input, the projected rows, the filtered rows, values if they are scaled, the output of the rule
        and the gated output, and the rest of the layer the residual stream and what its feed-forward layer keeps. Its
        backward holds the products of the rule's chunks, their gradients and those of the rows.

        Runs that are shorter than the chunks of their level need as much as full chunks, which is not counted.
        """
        element_bytes, tensor_size, hidden, ffn = sizes
        channels, values, heads = (width / tensor_size for width in (self.channels, self.value_width, self.num_heads))
        keys, chunk_states = heads * self.head_state[0], self.state / tensor_size / _CHUNK
        rows = channels + values + len(self.of_heads) * heads
        around = 2 * hidden + ffn[0] / element_bytes
        kept = element_bytes * (around + rows + channels + (2 + self.scales_values) * values) + 28 * heads
        rule = element_bytes * (2 * channels + 5 * keys + 6 * values + 2 * chunk_states + 2 * _CHUNK * heads)
        filters = 8 * channels + element_bytes * 2 * channels
        return LayerBytes(kept, max(rule + element_bytes * rows, filters + element_bytes * rows, ffn[1]))
