"""Defines the inputs of a forward pass besides its tokens: positions, and how its queries attend.

Megatron passes ``packed_seq_params`` unchanged through model, block, layer, pipeline stage and recomputation to the
core attention. Our contexts are therefore subclasses of it, and the core attention only calls ``context.attend``.
Training on a tree segment (``segment_context``) and decoding with a K/V cache (``decode_context``) are two contexts for
one model.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_dta.core.model.parallel.context_group import ContextGroup

if TYPE_CHECKING:
    from megatron_dta.core.model.attention.token_routing import TokenRouting
    from megatron_dta.core.model.hybrid.path_states import PathStates


@dataclass
class AttentionContext(PackedSeqParams):
    """One forward pass over ``n`` tokens.

    Attributes:
        position_ids: int64 [n], each token's position in its own sequence (its depth in the tree); indexes the rotary
            table.
        rotary_tables: cosine and sine of the tokens' angles, float32 [n, rotated channels / 2] each, including rows for
            padding tokens; a model with fused layers sets them once for all layers.
        routing: per-token inputs of the routers in layers with experts; None if the routers need none.
        path_states: states of the tokens' paths, for layers with a recurrence; None in passes that keep none.
        rows_per_rank: maximum number of rows of this pass on any rank that shares experts with this one; None if all
            have as many.
        step: the same object in all passes of a step, between which neither weights nor gradient buffers move, and no
            hook is added; None if the pass is of no step.
        reads_pages: whether this is a decoding pass over pages.
        context_group: the ranks that divide the pass's tokens; None if each computes all of them. ``position_ids`` and
            ``routing`` are of all tokens, ``rotary_tables`` of the rank's rows.
    """

    reads_pages: ClassVar[bool] = False

    position_ids: Tensor | None = None
    rotary_tables: tuple[Tensor, Tensor] | None = None
    routing: TokenRouting | None = None
    path_states: PathStates | None = None
    rows_per_rank: int | None = None
    step: object | None = None
    context_group: ContextGroup | None = None

    def __post_init__(self) -> None:
        # 'sbhd' makes Megatron's layers keep the shape [n, 1, heads, head size]; any other value would flatten it.
        self.qkv_format = "sbhd"

    @abstractmethod
    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attention output of the pass's tokens in one layer.

        Args:
            layer_number: 1-based number of the layer.
            query: [n, heads, head size], after QK-norm and rotary embedding; the rank's heads (its share of them in a
                context group).
            key, value: [n, KV heads, head size], the pass's own tokens.
            scale: factor on the scores.

        Returns:
            [n, heads, head size].
        """


def check_context(context: object) -> AttentionContext:
    """``context`` if it is an ``AttentionContext``; raises ``TypeError`` otherwise."""
    if not isinstance(context, AttentionContext):
        raise TypeError(f"the tree model needs an AttentionContext as packed_seq_params, got {type(context).__name__}")
    return context
