"""Predicts the seconds of a step on the busiest stage of the slowest replica, by part; the parts add up to the step.

gemm          products of the layers
attention     scores and values of visible pairs
logits        logits of trained edges, on the last stage
elementwise   norms, rotary embedding, activation, residuals, and reading the keys and values of ancestors
tensor        communication of the tensor group and of experts
launches      waiting for the host to launch the kernels of short segments
bubble        waiting for other stages
experts       waiting for longer segments of other ranks that share experts
data          reduction of gradients over the replicas
optimizer     reading and writing weights and states

Only the overlap of a pipeline schedule is counted; communication and computation do not overlap, so communication is an
upper estimate. Recomputation runs a forward again, which counts in gemm, attention, elementwise and tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from megatron_dta.core.planning.costs.element_bytes import DTYPE_BYTES
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import (
    ATTENTION_PASSES,
    FEW_ROWS,
    GEMM_PASSES,
    GROUPED_PRODUCTS,
    LOGIT_PASSES,
    Cluster,
    elementwise_channels,
)
from megatron_dta.extras.capacity.memory import StateSettings, rank_parameters, state_parameters
from megatron_dta.extras.capacity.work import ReplicaWork

# Share of the forward in a layer's elementwise work and communication.
FORWARD_PART = 1 / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds by the parts of the module's docstring."""

    gemm: float = 0.0
    attention: float = 0.0
    logits: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    launches: float = 0.0
    bubble: float = 0.0
    experts: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0

    def parts(self) -> dict[str, float]:
        """Seconds of each part by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    @property
    def computing(self) -> float:
        """Seconds in which the stage runs segments."""
        return self.gemm + self.attention + self.logits + self.elementwise + self.tensor + self.launches


def stage_time(
    shape: DecoderShape, mesh: RunMesh, cluster: Cluster, work: ReplicaWork, stage: int, recomputed: float = 0.0
) -> StepTime:
    """Predict the computing parts of a stage; ``recomputed`` is the share of tokens whose forward runs twice."""
    layers = mesh.stage_layers(stage)
    kinds = shape.kinds(layers)
    again_gemm, again_attention = 1 + recomputed / GEMM_PASSES, 1 + recomputed / ATTENTION_PASSES
    again = 1 + recomputed * FORWARD_PART
    grouped = sum(n for layer, n in kinds if shape.moe_layers[layer]) * shape.routed_weights
    plain = sum(n * shape.token_weights(layer) for layer, n in kinds) - grouped
    with_attention = sum(map(shape.has_attention, layers))
    attention_flops = 4.0 * ATTENTION_PASSES * with_attention * shape.pair_width * work.pairs
    logit_flops = 0.0
    if (len(mesh.layers) - 1) % mesh.pipeline == stage:
        logit_flops = 2.0 * LOGIT_PASSES * shape.hidden_size * shape.vocab_size * work.edges
    channels = [(count, elementwise_channels(shape, layer)) for layer, count in kinds]
    rows = mesh.tensor if mesh.sequence_parallel else 1
    moved = sum(
        2.0 * count * (hidden / rows + (attention + ffn) / mesh.tensor) for count, (hidden, attention, ffn) in channels
    )
    # Keys and values of ancestors are gathered in forward and backward; their gradients are added in float32.
    gathered = with_attention * shape.slot_width(mesh.tensor) * (2 * 2 * 2 + 2 * 4)
    longer, ranks = 1 + cluster.short_segment_tokens * mesh.context / work.segment_tokens, mesh.tensor * mesh.context
    weights = plain * longer + (grouped and grouped * grouped_factor(shape, mesh, work.segment_tokens))
    gemm_flops = GEMM_PASSES * 2.0 * (weights * work.tokens + with_attention * shape.expansion * work.path_tokens)
    moved_bytes = (moved * work.tokens + gathered * work.path_tokens) / mesh.context
    time = StepTime(
        gemm=gemm_flops / ranks / cluster.gemm_rate * again_gemm,
        attention=attention_flops / ranks / cluster.attention_rate * again_attention,
        logits=logit_flops / ranks / cluster.logit_rate * longer,
        elementwise=moved_bytes / cluster.hbm_rate * again * longer,
        tensor=_token_communication(shape, mesh, cluster, layers) * work.tokens / mesh.context * again,
    )
    return replace(time, launches=_waiting_for_launches(time, cluster, work, len(layers), recomputed))


def grouped_factor(shape: DecoderShape, mesh: RunMesh, segment_tokens: float) -> float:
    """Time of grouped products over that of large products: an expert has few rows of all ranks' segments."""
    segments = mesh.experts * mesh.expert_tensor / (mesh.tensor * mesh.context)
    rows = segment_tokens * segments * shape.moe_router_topk / shape.num_experts
    return GROUPED_PRODUCTS * (1 + FEW_ROWS / rows)


def _waiting_for_launches(
    time: StepTime, cluster: Cluster, work: ReplicaWork, num_layers: int, recomputed: float
) -> float:
    """Seconds by which launches prolong segments beyond their work.

    Without planned segments, all segments are assumed equal.
    """
    by_tokens = time.gemm + time.elementwise + time.tensor
    if work.planned is None:
        seconds, count = np.asarray(time.computing / max(1, work.segments)), work.segments
    else:
        tokens, pairs, edges = (counts / max(1, counts.sum()) for counts in work.planned[1])
        seconds, count = by_tokens * tokens + time.attention * pairs + time.logits * edges, 1
    floor = num_layers * cluster.floor_seconds_per_layer
    forward = floor * cluster.forward_floor_share
    waiting = np.maximum(0.0, forward * (1 + recomputed) - FORWARD_PART * seconds)
    waiting = waiting + np.maximum(0.0, floor - forward - (1 - FORWARD_PART) * seconds)
    return float(waiting.sum()) * count


def _token_communication(shape: DecoderShape, mesh: RunMesh, cluster: Cluster, layers: list[int]) -> float:
    """Seconds of communication per token of a rank in these layers, forward and backward."""
    row = 2.0 * shape.hidden_size
    tensor, ranks = mesh.tensor, mesh.experts * mesh.expert_tensor
    seconds = 0.0
    if tensor > 1:
        # Two all-reduces in the forward and two in the backward, each two ring passes; sequence parallelism gathers two
        # inputs once more.
        passes = 8.0 + 2.0 * mesh.sequence_parallel
        seconds += len(layers) * passes * row * (tensor - 1) / tensor / cluster.link(tensor)
    if mesh.context > 1:
        # Queries, keys, values and outputs are exchanged; in the backward their gradients, and attention's once more.
        with_states = sum(map(shape.is_recurrent, layers))
        channels = 3.0 * sum(map(shape.has_attention, layers)) * (2 * shape.query_width + 2 * shape.kv_width)
        channels += 2.0 * with_states * shape.recurrent_exchanged
        link = cluster.link(mesh.context, tensor)
        seconds += 2.0 * channels / tensor * (mesh.context - 1) / mesh.context / link
    num_expert_layers = sum(shape.moe_layers[layer] for layer in layers)
    if ranks > 1:
        # A token goes to every other rank and a sum comes back from it, in forward and backward; in a tensor group,
        # each rank sends its rows.
        seconds += num_expert_layers * 4.0 / tensor * row * (ranks - 1) / cluster.link(ranks)
    return seconds


def mesh_costs(
    shape: DecoderShape, mesh: RunMesh, cluster: Cluster, segment_tokens: int = CostModel.segment_tokens
) -> CostModel:
    """Compute the cost model of the whole model on such a mesh; the stages of a simulation take shares of it.

    Args:
        segment_tokens: maximum tokens of a segment.
    """
    one_stage = replace(mesh, pipeline=1, chunks=1, layers=(shape.num_layers,))

    def seconds(tokens: int = 0, pairs: int = 0, edges: int = 0) -> float:
        return stage_time(
            shape, one_stage, cluster, ReplicaWork(tokens, pairs, edges, 0, segment_tokens, 0, 0), 0
        ).computing

    return CostModel(
        seconds_per_token=seconds(tokens=1),
        seconds_per_pair=seconds(pairs=1),
        seconds_per_edge=seconds(edges=1),
        floor_seconds=cluster.floor_seconds_per_layer * shape.num_layers,
        forward_floor_share=cluster.forward_floor_share,
    )


def send_seconds(shape: DecoderShape, mesh: RunMesh, cluster: Cluster, segment_tokens: int) -> float:
    """Seconds to send the hidden states of a segment to the next stage."""
    if mesh.pipeline == 1:
        return 0.0
    rows = mesh.tensor if mesh.sequence_parallel else 1
    # Some neighbouring stages are on one node and others on two; the slower link counts.
    link = cluster.link(mesh.pipeline, mesh.tensor * mesh.copies)
    return 2.0 * segment_tokens * shape.hidden_size / rows / mesh.context / link


def reduction_seconds(shape: DecoderShape, mesh: RunMesh, cluster: Cluster, states: StateSettings, stage: int) -> float:
    """Seconds to reduce gradients over the replicas and to distribute the new weights."""
    parameters = rank_parameters(shape, mesh, stage)
    gradients = DTYPE_BYTES[states.main_grads]
    per_parameter = gradients + DTYPE_BYTES[states.weights] if states.distributed_optimizer else 2 * gradients
    seconds = 0.0
    for count, ranks, stride in (
        (parameters.dense, mesh.copies, mesh.tensor),
        (parameters.experts, mesh.expert_replicas, mesh.experts * mesh.expert_tensor),
    ):
        if ranks > 1 and count:
            seconds += count * per_parameter * (ranks - 1) / ranks / cluster.link(ranks, stride)
    return seconds


def optimizer_seconds(shape: DecoderShape, mesh: RunMesh, cluster: Cluster, states: StateSettings, stage: int) -> float:
    """Seconds to clip and update: reads states and gradients, writes states and weights."""
    if not states.optimizer:
        return 0.0
    parameters = rank_parameters(shape, mesh, stage)
    count = state_parameters(mesh, parameters) if states.distributed_optimizer else float(parameters.total)
    moved = 2.0 * states.optimizer_bytes + 2.0 * DTYPE_BYTES[states.main_grads] + DTYPE_BYTES[states.weights]
    on_gpu, on_host = 1 - states.offload_fraction, states.offload_fraction
    return count * moved * (on_gpu / cluster.hbm_rate + on_host / (cluster.host_gigabytes_per_second * 1e9))
