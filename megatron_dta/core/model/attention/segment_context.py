"""Attention of one tree segment: its tokens attend to their ancestors and to each other.

The autograd function of this module is the only connection between segments. Forward: the segment's K and V are written
to the pool, and its queries attend to [ancestors, own]. Backward: the ancestors' part of dK and dV is added to their
accumulators in the pool; the segment's own part is returned to autograd together with the gradients that the segment's
descendants added there before. The backward of a segment is then an ordinary ``backward`` of its own graph.
Recomputation (Megatron's or a whole second forward) writes the same K and V again.

Legend: N the segment's tokens, A its ancestors' tokens in earlier segments, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

import dta_kernels.tree_attention.reference as reference
from dta_kernels.invariant.attention import path_attention
from dta_kernels.invariant.products import is_batch_invariant
from dta_kernels.tree_attention.plan import TreeAttentionPlan, local_key_end_on_device
from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.attention.kv_pool import KVPool, SlotRuns

if TYPE_CHECKING:
    from dta_kernels.tree_attention.layer_cache import SharedByLayers


@dataclass
class SegmentContext(AttentionContext):
    """A segment's position in the stream and in the pool.

    Attributes:
        pool: K/V pool of the model chunk.
        layer_rows: index in the pool of each of the model chunk's layers with attention, by its 1-based number.
        slots: the segment's own slots.
        slot_runs: the slots of path and segment on the host; None if all layers' K and V are on the device.
        ancestor_slots: int64 [A], slots of the tokens on the root path that are in earlier segments, in stream order.
        query_index: int64 [N], stream indices of the segment's tokens; None with a plan.
        key_index, key_end: int64 [A + N], stream index and subtree end of every key, ancestors first; None with a plan.
        attention_plan: for the Triton kernels; None if the reference computes the attention.
        runs_hooks: whether the hooks of all parameters must run in the segment's backward. This is so in the last
            backward of a model chunk in a pass, if it reduces the gradients of replicas. Other backwards need not reach
            parameters whose gradients are written directly to their buffers.
    """

    pool: KVPool | None = None
    layer_rows: Mapping[int, int] = field(default_factory=dict)
    slots: slice | None = None
    slot_runs: SlotRuns | None = None
    ancestor_slots: Tensor | None = None
    query_index: Tensor | None = None
    key_index: Tensor | None = None
    key_end: Tensor | None = None
    attention_plan: TreeAttentionPlan | None = None
    runs_hooks: bool = True

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        if query.shape[0] == 0:
            # An empty segment attends to nothing, but every parameter must still get a gradient of zero.
            return query + key.sum() + value.sum()
        return _SegmentAttention.apply(query, key, value, self, self.layer_rows[layer_number], scale)

    def keys_and_values(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of [ancestors, own] in one layer of the model chunk, each [A + N, G, D]."""
        keys_SGD, values_SGD = self.pool.layer(layer)[:2]
        if self.ancestor_slots.shape[0] == 0:
            return keys_SGD[self.slots], values_SGD[self.slots]
        return keys_SGD.index_select(0, self.key_slots), values_SGD.index_select(0, self.key_slots)

    def attend_by_kernels(
        self, layer: int, query: Tensor, segment_kv: tuple[Tensor, Tensor], scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [N, heads, D] and log-sum-exp [heads, N] in one layer of the model chunk, without autograd.

        Args:
            segment_kv: views of the pool (``own_slots``) that hold the segment's keys and values.
        """
        # Imported here because the reference does not need Triton.
        from dta_kernels.tree_attention.launch import tree_attention_forward

        keys, values = self._gathered(layer) if self.ancestor_slots.shape[0] else segment_kv
        plan, ends = self.attention_plan, self.local_key_end
        out, lse = tree_attention_forward(query, keys, values, ends, plan, scale, self.shared)
        self.pool.finish(layer, gradients=False)
        return out, lse

    def attention_gradients(
        self, layer: int, grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, own keys and own values of ``attend_by_kernels``; adds the ancestors' to the pool."""
        from dta_kernels.tree_attention.launch import KeyGradients, tree_attention_backward

        keys, values = self._gathered(layer) if self.ancestor_slots.shape[0] else self.own_slots(layer)
        plan, ends, pool = self.attention_plan, self.local_key_end, self.pool.layer(layer)
        into = KeyGradients(pool.grad_keys, pool.grad_values, self.key_slots)
        gradients = tree_attention_backward(
            grad_out, query, keys, values, out, lse, ends, plan, scale, into, self.shared
        )
        self.pool.finish(layer, gradients=True)
        return gradients

    def attend_exchanged(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """``attend_by_kernels`` in a context group: query, key, value and output are rows of the rank's share with all
        heads of its tensor rank; the log-sum-exp is that of its own heads.
        """
        group = self.context_group
        query, key, value = self._to_heads(query, group.repeated(key), group.repeated(value))
        out, lse = self.attend_by_kernels(layer, query, self.store(layer, key, value), scale)
        return self._to_rows(out)[0], lse

    def exchanged_gradients(
        self, layer: int, grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, scale: float, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``attention_gradients`` in a context group, of the rows that ``attend_exchanged`` takes and returns.

        Args:
            kv_heads: key/value heads of the tensor rank.
        """
        grad_out, query, out = self._to_heads(grad_out, query, out)
        grads = self._to_rows(*self.attention_gradients(layer, grad_out, query, out, lse, scale))
        return grads[0], *(self.context_group.summed(grad, kv_heads) for grad in grads[1:])

    def _to_heads(self, *rows: Tensor) -> list[Tensor]:
        """Own heads of the segment's tokens; padding rows are left out."""
        return [part[: self.position_ids.shape[0]] for part in self.context_group.to_heads(*rows)]

    def _to_rows(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """The rank's rows of all heads; padding rows are zero."""
        missing = self.rows_of_group - self.position_ids.shape[0]
        return self.context_group.to_rows(*(F.pad(part, (0, 0, 0, 0, 0, missing)) for part in heads))

    @property
    def rows_of_group(self) -> int:
        """Rows of all ranks of the context group, padding included."""
        return self.rotary_tables[0].shape[0] * self.context_group.size

    def own_slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of the pool on the segment's keys and values, [N, G, D] each, in one layer of the model chunk."""
        pool = self.pool.layer(layer)
        return pool.keys[self.slots], pool.values[self.slots]

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the segment's keys and values to its slots, which are returned."""
        keys, values = self.own_slots(layer)
        keys.copy_(key)
        values.copy_(value)
        return keys, values

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of [ancestors, own] in one layer, until those of another layer or segment are gathered."""
        from dta_kernels.tree_attention.gather_keys import gather_keys

        pool, into = self.pool.layer(layer), self._gathered_into
        gather_keys(pool.keys, pool.values, self.key_slots, into)
        return into

    @cached_property
    def _gathered_into(self) -> tuple[Tensor, Tensor]:
        keys, values = self.pool.gathered
        num_keys = self.key_slots.shape[0]
        return keys[:num_keys], values[:num_keys]

    @cached_property
    def shared(self) -> SharedByLayers:
        from dta_kernels.tree_attention.layer_cache import SharedByLayers

        return SharedByLayers()

    @cached_property
    def key_slots(self) -> Tensor:
        """Slots of all keys, int64 [A + N]."""
        segment_slots = torch.arange(self.slots.start, self.slots.stop, device=self.ancestor_slots.device)
        return torch.cat([self.ancestor_slots, segment_slots])

    @cached_property
    def local_key_end(self) -> Tensor:
        """Subtree ends of the keys, int32 [A + N], in key positions."""
        if self.attention_plan is not None:
            return self.attention_plan.key_end
        return local_key_end_on_device(self.query_index, self.key_end)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, segment: SegmentContext, layer: int, scale: float
    ) -> Tensor:
        if segment.attention_plan is not None:
            out, lse = segment.attend_by_kernels(layer, query, segment.store(layer, key, value), scale)
        else:
            segment.store(layer, key, value)
            keys, values = segment.keys_and_values(layer)
            if is_batch_invariant():
                out, lse = path_attention(query, keys, values, segment.local_key_end, scale)
            else:
                out, lse = reference.tree_attention_forward(
                    query, keys, values, segment.query_index, segment.key_index, segment.key_end, scale
                )
            segment.pool.finish(layer, gradients=False)
        # K and V stay in the pool until the segment's backward, so only queries, output and log-sum-exp are saved.
        ctx.save_for_backward(query, out, lse)
        ctx.segment, ctx.layer, ctx.scale = segment, layer, scale
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):
        query, out, lse = ctx.saved_tensors
        segment, layer = ctx.segment, ctx.layer
        if segment.attention_plan is not None:
            return *segment.attention_gradients(layer, grad_out, query, out, lse, ctx.scale), None, None, None
        keys, values = segment.keys_and_values(layer)
        dq, dk, dv = reference.tree_attention_backward(
            grad_out, query, keys, values, out, lse, segment.query_index, segment.key_index, segment.key_end, ctx.scale
        )
        num_ancestors, pool = segment.ancestor_slots.shape[0], segment.pool.layer(layer)
        # Slots are distinct, so the scatter is deterministic on a GPU too.
        pool.grad_keys.index_add_(0, segment.ancestor_slots, dk[:num_ancestors])
        pool.grad_values.index_add_(0, segment.ancestor_slots, dv[:num_ancestors])
        grad_key = dk[num_ancestors:] + pool.grad_keys[segment.slots]
        grad_value = dv[num_ancestors:] + pool.grad_values[segment.slots]
        segment.pool.finish(layer, gradients=True)
        return dq, grad_key.to(query.dtype), grad_value.to(query.dtype), None, None, None
