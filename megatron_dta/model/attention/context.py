"""What a forward pass needs besides tokens: positions, and how its queries attend.

Megatron hands ``packed_seq_params`` untouched through model, block, layer, pipeline stage and recomputation to the core
attention. Our contexts are therefore subclasses of it, and the core attention only calls ``context.attend``: training
on a tree segment (``segment_context``) and decoding with a K/V cache (``decode_context``) are two contexts over one
model.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dta.model.attention.token_routing import TokenRouting


@dataclass
class AttentionContext(PackedSeqParams):
    """One forward pass over ``n`` tokens.

    Attributes:
        position_ids: int64 [n], each token's position in its own sequence (its depth in the tree); indexes the rotary
            table.
        rotary_tables: cosine and sine of the tokens' angles, float32 [n, rotated channels / 2] each, with rows for
            tokens that only fill up a pass; set by a model with fused layers, once for all of them.
        routing: what the routers of layers with experts know of the tokens; None where they need to know nothing.
    """

    position_ids: Tensor | None = None
    rotary_tables: tuple[Tensor, Tensor] | None = None
    routing: TokenRouting | None = None

    def __post_init__(self) -> None:
        # 'sbhd' keeps Megatron's layers on the layout [n, 1, heads, head size]; any other value would flatten them.
        self.qkv_format = "sbhd"

    @abstractmethod
    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output of the pass's tokens in one layer.

        Args:
            layer_number: 1-based number of the layer.
            query: [n, heads, head size], after QK-norm and rotary embedding; the rank's heads.
            key, value: [n, KV heads, head size], the pass's own tokens.
            scale: factor on the scores.

        Returns:
            [n, heads, head size].
        """


@dataclass
class EmptyContext(AttentionContext):
    """A pass over no tokens: it joins what the ranks do together in every layer, and nothing else."""

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return query + key.sum() + value.sum()


def check_context(context: object) -> AttentionContext:
    """``context`` if it is an ``AttentionContext``; a ``TypeError`` that says what is missing otherwise."""
    if not isinstance(context, AttentionContext):
        raise TypeError(f"the tree model needs an AttentionContext as packed_seq_params, got {type(context).__name__}")
    return context
