"""The sizes of latent attention, under Megatron's names, and what its layers take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.shapes.mixer import LayerBytes, LayerSizes, Mixer

# Bytes of the keys and values of several heads on a path, and of their gradients.
_MOST_EXPANDED = 1 << 30
# Heads for which that does not hold: a single one has too few tiles of queries for a whole GPU.
_LEAST_HEADS = 2


@dataclass(frozen=True)
class Sizes(Mixer):
    """Sizes of latents and heads.

    Attributes:
        num_heads: query heads, which is ``num_attention_heads`` of the model.
        q_lora_rank: channels of the queries' latent; None if queries follow from the hidden state.
        kv_lora_rank: channels of the latent of keys and values.
        qk_head_dim: channels of a query or key without those for its position.
        qk_pos_emb_head_dim: channels for positions; those of the keys are shared by all heads.
        v_head_dim: channels of a value.
    """

    kind: ClassVar[str] = "latent_attention"
    is_recurrent: ClassVar[bool] = False

    num_heads: int = 128
    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    @property
    def query_size(self) -> int:
        """Channels of a query or key."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def slot(self) -> int:
        return self.kv_lora_rank + self.qk_pos_emb_head_dim

    @property
    def rotated_channels(self) -> int:
        return self.qk_pos_emb_head_dim

    @property
    def pair_width(self) -> float:
        return self.num_heads * (self.query_size + self.v_head_dim) / 2

    @property
    def expansion(self) -> int:
        return self.kv_lora_rank * self.num_heads * (self.qk_head_dim + self.v_head_dim)

    def projections(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        queries, low = self.num_heads * self.query_size, self.q_lora_rank
        of_queries = {"linear_q_proj": (hidden_size, queries)}
        if low is not None:
            of_queries = {"linear_q_down_proj": (hidden_size, low), "linear_q_up_proj": (low, queries)}
        return of_queries | {
            "linear_kv_down_proj": (hidden_size, self.slot),
            "linear_kv_up_proj": (self.kv_lora_rank, self.expansion // self.kv_lora_rank),
            "linear_proj": (self.num_heads * self.v_head_dim, hidden_size),
        }

    @property
    def vectors(self) -> tuple[int, int]:
        return 0, self.kv_lora_rank + (self.q_lora_rank or 0)

    def heads_refusal(self, tensor: int, context: int) -> str | None:
        if context > 1:
            return f"--context-parallel-size {context} is not supported with latent attention; leave it out"
        latent = {"kv_lora_rank + qk_pos_emb_head_dim": self.slot, "q_lora_rank": self.q_lora_rank or 0}
        for name, count in ({"num_heads": self.num_heads} | latent).items():
            if count % tensor:
                return f"--tensor-model-parallel-size {tensor} does not divide {name} {count} of latent attention"
        return None

    def check(self, model: Any, parallel: Any) -> None:
        heads = {model.num_attention_heads, model.num_query_groups, self.num_heads}
        if len(heads) > 1 or model.kv_channels != self.query_size:
            raise InputError(
                f"latent_attention needs --num-attention-heads and --num-query-groups {self.num_heads} and "
                f"--kv-channels {self.query_size}, as its own sizes say"
            )
        if self.v_head_dim > self.query_size:
            raise InputError(
                f"v_head_dim {self.v_head_dim} above the {self.query_size} channels of a key is not supported"
            )
        refused = (
            ("layers with plain attention", not all(model.mixer_layers)),
            ("models without --swiglu, RMSNorm and --disable-bias-linear", not _is_plain(model)),
            ("--qk-layernorm", model.qk_layernorm),
            ("rotary_percent below 1", model.rotary_percent != 1),
            ("--add-qkv-bias", model.add_qkv_bias),
            ("attention_output_gate or apply_layernorm_1p", model.attention_output_gate or model.apply_layernorm_1p),
            ("--recompute-granularity selective (keys and values are recomputed in any case)",
             model.recompute_granularity == "selective"),
        )  # fmt: skip
        for what, is_set in refused:
            if is_set:
                raise InputError(f"latent_attention does not support {what}; leave one of them out")

    def layer_bytes(self, sizes: LayerSizes) -> LayerBytes:
        """A layer keeps its input and its normed input, the residual stream, latents before their norms and those of
        queries behind it, queries, attention's output with and without padding, and what its feed-forward part keeps.
        """
        element_bytes, tensor_size, hidden, ffn = sizes
        accumulator, heads = max(4, element_bytes), self.num_heads / tensor_size
        outputs = self.query_size + (self.v_head_dim if self.v_head_dim < self.query_size else 0)
        kept = heads * (element_bytes * (self.query_size + outputs) + accumulator) + ffn[0] + 16
        kept += element_bytes * (3 * hidden + self.slot + 2 * (self.q_lora_rank or 0))
        work = element_bytes * (6 * heads * self.query_size + 4 * self.slot) + accumulator * heads * self.query_size
        return LayerBytes(kept, max(ffn[1], work))

    def heads_at_once(self, path_tokens: int, num_heads: int, element_bytes: int) -> int:
        of_head = path_tokens * self._head_bytes(element_bytes)
        divisors = [heads for heads in range(1, num_heads + 1) if num_heads % heads == 0]
        return max(heads for heads in divisors if heads <= _LEAST_HEADS or heads * of_head <= _MOST_EXPANDED)

    def _head_bytes(self, element_bytes: int) -> int:
        """Of a token on a path: a head's key and value and their gradients."""
        return 2 * self.query_size * (element_bytes + max(4, element_bytes))

    def path_bytes(self, element_bytes: int, tensor_size: int, tokens: Any) -> Any:
        """Latents of the path and their gradients; of the heads that attend at a time keys, values and gradients."""
        of_head = self._head_bytes(element_bytes) * tokens
        expanded = np.minimum(
            self.num_heads / tensor_size * of_head, np.maximum(_LEAST_HEADS * of_head, _MOST_EXPANDED)
        )
        return (element_bytes + max(4, element_bytes)) * self.slot * tokens + expanded


def _is_plain(model: Any) -> bool:
    return model.swiglu and model.normalization == "RMSNorm" and model.disable_bias_linear
