"""Memory of a rank by its parts, and what of it a walk over the ops holds at most.

    K/V slots      K and V of every token in flight and the accumulators of their gradients, in all layers of the rank
    activations    of each segment in flight that keeps them, from its forward to its backward
    inputs         of each segment in flight whose forward runs again: what came in from the stage before
    one segment    whatever its kind, the segment that runs backward has its activations (they were kept, or its forward
                   has just run again), and its backward needs room of its own: the gathered K and V of its root path,
                   and gradients inside a layer or, at another time, a chunk of logits and the gradient of the largest
                   weight; the more of the two counts

Weights, gradients and optimizer states are constant through a step and no part of this. So the last segment of a path
keeps its activations for nothing: its backward, which needs them, is the next op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.planning.schedule import OpKind

GIB = float(1 << 30)


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes on a rank; none is negative.

    Attributes:
        kept_per_token_and_layer: activations that a segment's backward needs, of a token in a layer.
        kept_per_token: the same, once for all layers of a rank.
        kv_per_token_and_layer: K, V, dK and dV.
        input_per_token: hidden states that come in from the stage before.
        work_per_token, work_per_path_token, work_fixed: room that a running segment needs beyond its activations: for
            each token of its root path (its own included), and for each of its tokens or whatever its length, which
            of these two is more.
    """

    kept_per_token_and_layer: float
    kept_per_token: float
    kv_per_token_and_layer: float
    input_per_token: float
    work_per_token: float
    work_per_path_token: float
    work_fixed: float

    @classmethod
    def of_shape(
        cls,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        kv_channels: int,
        vocab_size: int,
        swiglu: bool = True,
        element_bytes: int = 2,
        tensor_size: int = 1,
        sequence_parallel: bool = False,
        logit_rows: int = 1024,
        fused: bool = True,
        fused_attention: bool = True,
    ) -> SegmentBytes:
        """Bytes by counting tensors. Measured bytes (``CostFile``) are better.

        A fused layer keeps its input, the mixed queries, keys and values, attention's output and log-sum-exp, the
        residual stream behind attention, the output of the first feed-forward product, and the statistics of two
        norms; everything else it computes again. Layers of plain modules keep what each of their operations read, in
        float32 where a norm computes in it; of these the most that any norm and activation function keeps is counted.
        Between them the backward needs about the gradients of all that a fused layer keeps at once.

        Args:
            element_bytes: of weights and activations; gradients of K and V take at least 4.
            logit_rows: rows of logits that exist at once.
            fused: whether layers run on the fused kernels, norms and activation function included.
            fused_attention: whether attention runs on its kernels, which add ancestors' gradients up where they are.
        """
        query, groups = num_attention_heads * kv_channels // tensor_size, num_query_groups * kv_channels // tensor_size
        hidden = hidden_size / (tensor_size if sequence_parallel else 1)
        ffn = (2 if swiglu else 1) * ffn_hidden_size / tensor_size
        mixed = query + 2 * groups
        accumulator = max(4, element_bytes)
        statistics = 4 * num_attention_heads / tensor_size + 8 * hidden / hidden_size
        kept = fused_kept = element_bytes * (2 * hidden + mixed + query + ffn) + statistics
        if not fused:
            norms = 2 * element_bytes + 4 * accumulator
            wide = 5 * ffn / 2 if swiglu else 2 * ffn
            # Queries and keys are mixed, normed and rotated one by one, each read by what follows.
            kept = norms * hidden + element_bytes * (7 * query + 5 * groups + wide) + 2 * statistics
        kv = 2 * groups * (element_bytes + accumulator)
        table = hidden_size * vocab_size / tensor_size
        # Gradients of what is kept, outputs of norms and of the activation function, whole hidden states of the group.
        work = fused_kept + element_bytes * (4 * hidden_size + ffn + ffn_hidden_size / tensor_size)
        # Logits, their gradient and room for a chunk's softmax; plain operations make copies in float32.
        row = 3 * element_bytes if fused else 2 * element_bytes + 3 * accumulator
        logits = logit_rows * vocab_size / tensor_size * row
        return cls(
            kept_per_token_and_layer=kept,
            kept_per_token=element_bytes * 4 * hidden_size,
            kv_per_token_and_layer=kv,
            input_per_token=element_bytes * hidden,
            work_per_token=work,
            work_per_path_token=2 * groups * element_bytes if fused_attention else kv,
            work_fixed=logits + table * (element_bytes if fused else element_bytes + accumulator),
        )

    def kept(self, layers: float) -> float:
        """Bytes of a token's activations on a rank of so many layers."""
        return layers * self.kept_per_token_and_layer + self.kept_per_token

    def work(self, tokens: np.ndarray | float, path_tokens: np.ndarray | float) -> np.ndarray | float:
        """Room for a running segment of ``tokens`` tokens at the end of a path of ``path_tokens``."""
        return np.maximum(self.work_per_token * tokens, self.work_fixed) + self.work_per_path_token * path_tokens


@dataclass(frozen=True)
class MemoryBudget:
    """What a step may take on the ranks of a pipeline.

    Attributes:
        gib: memory that each rank may use in all (``--tree-memory-gib``).
        constant: bytes of that on each pipeline rank that are weights, gradients and optimizer states.
        bytes: of everything else.
    """

    gib: float
    constant: tuple[float, ...]
    bytes: SegmentBytes

    def available(self, rank: int) -> float:
        """Bytes that a step may take on a pipeline rank."""
        return self.gib * GIB - self.constant[rank]


def peak_bytes(
    ops: Sequence[tuple[OpKind, int, int]],
    lengths: Sequence[int],
    path_tokens: Sequence[int],
    kept: Sequence[bool],
    num_slots: Sequence[int],
    layers: Sequence[float],
    has_input: Sequence[bool],
    each: SegmentBytes,
) -> float:
    """Most bytes that a rank's ops hold at once, the K/V slots included, which are there throughout.

    Args:
        ops: (kind, segment, chunk) in order; a backward in two ops ends with its second.
        lengths, path_tokens, kept: of each segment: its tokens, those of its root path with its own, and whether it
            keeps its activations.
        num_slots, layers, has_input: of each chunk of the rank: K/V slots, layers, and whether a stage comes before it.
    """
    slots = sum(count * own * each.kv_per_token_and_layer for count, own in zip(num_slots, layers, strict=True))
    live = peak = 0.0
    splits = {(segment, chunk) for kind, segment, chunk in ops if kind is OpKind.BACKWARD_WEIGHT}
    for kind, segment, chunk in ops:
        activations = each.kept(layers[chunk]) * lengths[segment]
        held = activations if kept[segment] else has_input[chunk] * each.input_per_token * lengths[segment]
        work = each.work(lengths[segment], path_tokens[segment])
        if kind is OpKind.FORWARD:
            live += held
        # The segment's activations are there in its backward, and at the end of a forward that keeps them.
        if kept[segment]:
            peak = max(peak, live + work)
        else:
            peak = max(peak, live + work + (0.0 if kind is OpKind.FORWARD else activations))
        if kind is OpKind.FORWARD:
            continue
        if kind is not OpKind.BACKWARD_INPUT or (segment, chunk) not in splits:
            live -= held
    return slots + peak
