"""Predicts the memory of a rank's segments: what each token keeps, and the room that a running segment needs.

    K/V slots      keys and values of every token in flight and the accumulators of their gradients, in all layers of
                   the rank, and a buffer in which one layer's keys and values are contiguous
    activations    of each segment in flight that keeps them, from its forward to its backward
    inputs         of each segment in flight that recomputes its forward: the hidden states from the stage before
    one segment    the segment that runs backward has its activations, kept or recomputed, and needs working memory,
                   which is the maximum over three times: a chunk of logits with its gradients; the gradients inside a
                   feed-forward layer; and the gradients around an attention with the tiles of dS, which all layers of
                   a segment share and which exist from the first layer's attention to the end of its backward
    fixed          workspaces of libraries on both launching threads, tables of positions, plan and indices

``memory_budget`` adds them up over the ops of a step.

Layers that run as one autograd function (``layers.fused_autograd_layer``) are counted tensor by tensor. In 28 steps
measured on an H200, the count was too low by the same 0.12 GiB, which ``FIXED_BYTES`` includes, and in a few of them by
up to 0.7% more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_dta.core.shapes.decoder import DecoderShape

# Bytes that do not depend on a step's segments: cuBLAS workspaces of two threads (32 MiB each), position tables, plan.
FIXED_BYTES = 9 * float(1 << 24)
# Tiles of dS: the kernels' settings allow 1 GiB, and 1/8 more if heads do not divide evenly among launches.
MOST_SCORES = 9 * float(1 << 27)
# Number of tokens by which tiles of a segment may extend beyond its queries and its keys.
TILE_TOKENS, TILE_KEYS = 64, 128
# Bytes of indices for a token on a segment's path: its slot, subtree end and index among the keys.
_INDEX_BYTES = 64
# Rows that the experts of a rank may get in a layer, over their equal share, if experts are divided over ranks. Layers
# route independently, so what a rank keeps of all its layers deviates less. More rows are computed all the same, but
# their memory is not counted.
EXPERT_SHARE = 1.25
# With ``--kv-offload-fraction``, layers on the host take turns in this number of buffers on the device.
NUM_BUFFERS = 2


def layers_on_host(num_layers: int, fraction: float) -> list[int]:
    """The layers, counted from 0, whose K/V slots are on the host: the given share, evenly spread over the depth."""
    count = round(fraction * num_layers)
    return [(2 * i + 1) * num_layers // (2 * count) for i in range(count)]


def layers_on_device(num_layers: float, fraction: float) -> float:
    """Number of layers whose K/V slots take memory on the device, buffers included."""
    count = round(fraction * num_layers)
    return num_layers - count + min(NUM_BUFFERS, count)


@dataclass(frozen=True)
class RankTensors:
    """How a rank holds the tensors of a step.

    Attributes:
        element_bytes: bytes per element of weights and activations; gradients of K and V take at least 4.
        tensor_size, sequence_parallel: tensor parallelism.
        context_size: ranks that divide the tokens of a segment, and the heads of its attention.
        logit_rows: number of rows of logits that exist at once.
        fused: whether layers run on the fused kernels, norms and activation function included.
        fused_attention: whether attention runs on its kernels, which accumulate ancestors' gradients in place.
        in_buffers: whether gradients of weights are accumulated in buffers, without a tensor of their own first.
        float32_logits: whether logits are float32 while their gradient is in the weights' dtype.
        expert_ranks: number of ranks over which experts are divided.
        expert_tensor_size: tensor parallelism of each expert.
        kv_offload_fraction: share of the layers whose K/V slots are on the host.
    """

    element_bytes: int = 2
    tensor_size: int = 1
    sequence_parallel: bool = False
    logit_rows: int = 1024
    fused: bool = True
    fused_attention: bool = True
    in_buffers: bool = True
    float32_logits: bool = False
    expert_ranks: int = 1
    context_size: int = 1
    expert_tensor_size: int = 1
    kv_offload_fraction: float = 0.0


@dataclass(frozen=True)
class SegmentBytes:
    """Coefficients of a rank's bytes; none is negative.

    Attributes:
        kept_per_token_and_layer: activations that a segment's backward needs, for each token and layer.
        kept_per_token: activations for each token that do not depend on the number of layers.
        path: further working memory for the tokens on a root path; None if there is none.
        spread_per_token: additional activations for each token of a rank with a single layer, whose experts may get
            more rows than their share; in proportion to the square root of the number of layers.
        kv_per_token_and_layer: K, V, dK and dV of a token in flight in a layer.
        input_per_token: hidden states received from the stage before.
        work_per_token, work_per_path_token, work_fixed: working memory of a running segment beyond its activations. It
            is the sum of ``work_per_path_token`` for each token on its root path (its own included) and the maximum of
            ``work_per_token`` for each of its tokens, ``work_fixed``, and the next.
        scores_per_token, scores_per_pair, most_scores: working memory while attention's gradients are computed: for
            each of its tokens, and for each pair of a token and a token of its path, the latter at most
            ``most_scores``.
        kv_per_token: bytes of a token in flight, once for all layers of a rank.
        fixed: bytes that exist throughout the step.
        kv_offload_fraction: share of a rank's layers with attention whose K/V slots are on the host.
        attention_share: share of the layers that have attention; the others have no K/V slots.
    """

    kept_per_token_and_layer: float
    kept_per_token: float
    kv_per_token_and_layer: float
    input_per_token: float
    work_per_token: float
    work_per_path_token: float
    work_fixed: float
    scores_per_token: float = 0.0
    scores_per_pair: float = 0.0
    most_scores: float = 0.0
    kv_per_token: float = 0.0
    fixed: float = 0.0
    kv_offload_fraction: float = 0.0
    attention_share: float = 1.0
    spread_per_token: float = 0.0
    path: Callable | None = None

    @classmethod
    def of_shape(
        cls, shape: DecoderShape, rank: RankTensors | None = None, layers: Sequence[int] | None = None
    ) -> SegmentBytes:
        """Count the bytes of tensors.

        A fused layer keeps its input, the mixed queries, keys and values, attention's output and log-sum-exp, the
        residual stream behind attention, the output of the first feed-forward product, and the statistics of two
        norms. Layers of plain modules keep the inputs of each of their operations, in float32 if a norm computes in it;
        the largest case is counted. A layer's backward also needs about the gradients of everything that a fused layer
        keeps, at once, unless it runs as a single function (one tensor rank with gradient buffers).

        Args:
            shape: the decoder; its experts must run as grouped products on the kernels.
            rank: how a rank holds its tensors; None for the defaults.
            layers: the layers that it has, from 0; None for all. Coefficients per layer are means over them, working
                memory is that of the largest kind.
        """
        from megatron_dta.core.planning.costs.state_bytes import LayerSizes, mixed_layer_bytes

        rank, attention_share = rank or RankTensors(), shape.attention_share(layers)
        moe_layers = [shape.moe_layers[layer] for layer in layers] if layers else shape.moe_layers
        element_bytes, tensor_size = rank.element_bytes, rank.tensor_size
        hidden_size, fused, fused_attention = shape.hidden_size, rank.fused, rank.fused_attention
        heads = shape.num_attention_heads / tensor_size
        query, groups = shape.query_width // tensor_size, shape.kv_width // tensor_size
        hidden = hidden_size / (tensor_size if rank.sequence_parallel else 1)
        width = shape.ffn_hidden_size / tensor_size
        ffn = (2 if shape.swiglu else 1) * width
        mixed, accumulator = query + 2 * groups, max(4, element_bytes)
        statistics = 4 * heads + 8 * hidden / hidden_size
        kept = fused_kept = element_bytes * (2 * hidden + mixed + query + ffn) + statistics
        wide = 2 * ffn if not shape.swiglu else ffn if fused else 5 * ffn / 2
        if not fused:
            # Queries and keys are mixed, normed and rotated one by one, each read by what follows.
            kept = (
                (2 * element_bytes + 4 * accumulator) * hidden
                + element_bytes * (7 * query + 5 * groups + wide)
                + 2 * statistics
            )
        kv, spread = shape.slot_width(tensor_size) * (element_bytes + accumulator), 0.0
        table, has_experts = hidden_size * shape.vocab_size / tensor_size, any(moe_layers)
        is_function = _is_function(shape, rank, has_experts)
        is_direct = is_function and not has_experts
        largest_gradient = 0 if rank.in_buffers else table * (element_bytes if fused else element_bytes + accumulator)
        # Gradients of what is kept, outputs of norms and of the activation function, whole hidden states of the group.
        work = fused_kept + element_bytes * (4 * hidden_size + ffn + width)
        if is_direct:
            # The gradient of the layer's output; the activation function's output, its gradient and that of its input.
            work = element_bytes * (hidden + ffn + 2 * width)
        whole_rows = 4 * element_bytes * hidden_size
        of_experts = 0.0, 0.0
        if has_experts:
            attention = element_bytes * (2 * hidden + mixed + query) + statistics
            of_experts, spread = _expert_bytes(shape, rank, is_function)
            share, of_routed = sum(moe_layers) / len(moe_layers), max(attention, of_experts[1]) + whole_rows
            kept = share * (attention + of_experts[0]) + (1 - share) * kept
            work = of_routed if share == 1 else max(of_routed, work + whole_rows)
        if shape.mixer is not None or shape.hybrid_layer_pattern is not None:
            parts = (element_bytes * wide, element_bytes * (ffn + 3 * width)), of_experts
            sizes = [LayerSizes(element_bytes, tensor_size, hidden, (kept, work + whole_rows)) for kept, work in parts]
            kept, work = mixed_layer_bytes(shape, sizes, layers or range(shape.num_layers))
        # Input and output of the last norm (recomputed if fused), rows of logits' hidden states; tables of positions.
        last = 3 if is_direct else 2 if fused and has_experts else 4
        counted = cls(
            kept_per_token_and_layer=kept,
            spread_per_token=spread,
            kept_per_token=element_bytes * last * hidden_size + (4 * shape.kv_channels if fused else 0),
            kv_per_token_and_layer=kv * attention_share,
            input_per_token=element_bytes * hidden,
            work_per_token=work,
            work_per_path_token=_INDEX_BYTES if fused_attention else kv * (attention_share > 0),
            path=partial(shape.mixer.path_bytes, element_bytes, tensor_size) if shape.keeps_rows else None,
            work_fixed=rank.logit_rows * shape.vocab_size / tensor_size * _of_logit(rank, is_direct) + largest_gradient,
            kv_offload_fraction=rank.kv_offload_fraction,
            attention_share=attention_share,
        )
        if fused_attention:
            counted = counted._with_scores(query, 0 if shape.keeps_rows else groups, heads, element_bytes)
        return counted._over_context(rank, shape, is_function) if rank.context_size > 1 else counted

    def _over_context(self, rank: RankTensors, shape: DecoderShape, is_function: bool) -> SegmentBytes:
        """The same bytes if context ranks divide the tokens, and the heads inside attention."""
        size, row = rank.context_size, rank.element_bytes * shape.query_width // rank.tensor_size
        kv_ranks = min(size, shape.num_query_groups // rank.tensor_size)
        # Queries, the output and its gradient, before and after their exchange; repeated keys and values, too.
        exchanged = 6 * row
        if kv_ranks < size:
            exchanged += 8 * rank.element_bytes * size * shape.kv_channels
        # Modules keep the exchanged queries and output.
        kept = 0 if is_function else 2 * row
        if shape.mixer is not None:
            # A recurrence keeps what it received, and makes the parts that it sends one tensor, as in its backward.
            rule = rank.element_bytes * shape.mixer.exchanged[0] / rank.tensor_size
            kept = self.attention_share * kept + (1 - self.attention_share) * rule
            exchanged = max(exchanged, 4 * rule)
        indices = _INDEX_BYTES if rank.fused_attention else 0
        return replace(
            self,
            kept_per_token_and_layer=(self.kept_per_token_and_layer + kept) / size,
            kept_per_token=self.kept_per_token / size,
            spread_per_token=self.spread_per_token / size,
            kv_per_token_and_layer=self.kv_per_token_and_layer / kv_ranks,
            input_per_token=self.input_per_token / size,
            work_per_token=(self.work_per_token + exchanged) / size,
            work_per_path_token=indices + (self.work_per_path_token - indices) / kv_ranks,
            scores_per_token=(self.scores_per_token + exchanged) / size if self.scores_per_token else 0.0,
            scores_per_pair=self.scores_per_pair / size,
            kv_per_token=self.kv_per_token / kv_ranks,
        )

    def _with_scores(self, query: float, groups: float, heads: float, element_bytes: int) -> SegmentBytes:
        """The same bytes if attention runs on its kernels, for a rank's query channels, key channels and heads."""
        if not self.attention_share:
            return replace(self, fixed=FIXED_BYTES)
        mixed = query + 2 * groups
        # Tiles of dO and Q, and two rows of statistics: like dS, they exist until the end of the segment's backward.
        stays = 2 * element_bytes * query + 8 * heads
        # The gradients of the layer's output, of the stream, and of Q, K and V; queries and dO, or the mixed gradient.
        around = 2 * self.input_per_token + element_bytes * (mixed + max(2 * query, mixed)) + stays
        return replace(
            self,
            # From the second layer on, dS exists too, but the activations of the previous layer are free.
            scores_per_token=max(around, self.work_per_token + stays - self.kept_per_token_and_layer),
            scores_per_pair=element_bytes * heads,
            most_scores=MOST_SCORES,
            kv_per_token=2 * element_bytes * groups,
            fixed=FIXED_BYTES,
        )

    def kept(self, layers: float) -> float:
        """Bytes of a token's activations on a rank with ``layers`` layers."""
        return layers * self.kept_per_token_and_layer + layers**0.5 * self.spread_per_token + self.kept_per_token

    def work(self, tokens: np.ndarray | float, path_tokens: np.ndarray | float) -> np.ndarray | float:
        """Working memory of a running segment of ``tokens`` tokens at the end of a path of ``path_tokens``."""
        work = np.maximum(self.work_per_token * tokens, self.work_fixed)
        if self.scores_per_token or self.most_scores:
            pairs = (tokens + TILE_TOKENS) * (path_tokens + TILE_KEYS)
            scores = np.minimum(self.scores_per_pair * pairs, self.most_scores)
            work = np.maximum(work, self.scores_per_token * tokens + scores)
        work = work + self.work_per_path_token * path_tokens
        return work if self.path is None else work + self.path(path_tokens)

    def slot(self, layers: float) -> float:
        """Bytes of a token in flight on a rank with ``layers`` layers, without its activations."""
        with_attention = layers * self.attention_share
        share = layers_on_device(with_attention, self.kv_offload_fraction) / with_attention if with_attention else 1.0
        return share * layers * self.kv_per_token_and_layer + self.kv_per_token

    def host_slot(self, layers: float) -> float:
        """Bytes of a token in flight on the host."""
        with_attention = layers * self.attention_share
        count = round(self.kv_offload_fraction * with_attention)
        return count / with_attention * layers * self.kv_per_token_and_layer if count else 0.0


def _is_function(shape: DecoderShape, rank: RankTensors, has_experts: bool) -> bool:
    """Whether all layers run as a single function each (``layers.fused_autograd_layer``)."""
    is_shared = has_experts and shape.moe_shared_expert_intermediate_size is not None
    on_kernels = rank.fused and rank.fused_attention and rank.in_buffers
    is_plain = shape.mixer is None and shape.hybrid_layer_pattern is None
    return on_kernels and rank.tensor_size == 1 and not is_shared and is_plain


def _of_logit(rank: RankTensors, is_direct: bool) -> float:
    """Bytes of a logit with its gradient and room for a chunk's softmax; plain operations make copies in float32."""
    size = rank.element_bytes
    logit_bytes = size if is_direct else 3 * size if rank.fused else 2 * size + 3 * max(4, size)
    return logit_bytes + (4 if rank.float32_logits and size < 4 else 0)


def _expert_bytes(shape: DecoderShape, rank: RankTensors, is_function: bool) -> tuple[tuple[float, float], float]:
    """Bytes of a token in a layer's experts: kept until the backward, and in use during it; and how much more may be
    kept if the rank's experts get more rows than their share.

    A token has a row for each of its experts, of which the first product is kept, with the indices of the rows; router
    and experts keep its input, which a layer that is one function recomputes, and the router its scores. Each of T
    tensor ranks routes 1 / T of the tokens. If experts are divided, a rank has a token of each rank of their group for
    each of its own, and rows for its share of their experts; experts on tensor ranks have the rows of all of them, and
    a part of the width. Shared experts keep what plain modules keep, and before a gate their output. Without SwiGLU the
    gradient of the activation function takes plain operations.
    """
    size, tensor, group = rank.element_bytes, rank.tensor_size, rank.expert_ranks * rank.expert_tensor_size
    hidden, width = shape.hidden_size / tensor, shape.expert_width / rank.expert_tensor_size
    rows = shape.moe_router_topk * rank.expert_tensor_size / tensor
    shared = (shape.moe_shared_expert_intermediate_size or 0) / tensor
    gates = 2 if shape.swiglu else 1
    # Of all ranks' tokens: order, tokens and places of the rows. Of its own: choices and weights.
    indices = 3 * 8 * shape.moe_router_topk * group / tensor + 16 * shape.moe_router_topk + 16
    travelling = size * group * hidden if group > 1 else 0
    of_rows = size * rows * (gates * width + 1)
    kept = size * hidden * (not is_function) + of_rows + travelling + indices + 8 * shape.num_experts / tensor
    kept += size * (hidden * shape.moe_shared_expert_gate + (5 if shape.swiglu else 2) * shared) if shared else 0
    more = EXPERT_SHARE if rank.expert_ranks > 1 else 1.0
    # The gradient of the first product, and that of the rows' input or of the activation before; tokens or sums of all
    # ranks on their way there, here and back; indices while they are sorted.
    of_activation = gates * width + max(shape.hidden_size, width) if shape.swiglu else 6 * width
    work = size * more * rows * of_activation
    work += size * (3 * hidden + 3 * gates * shared) + 2 * indices + 3 * travelling
    return (kept, work), (more - 1) * of_rows
