"""Enumerates the meshes and settings that a model and a cluster allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.pipeline.layers import layers_per_stage
from megatron_dta.core.shapes.decoder import DecoderShape, context_refusal
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import Cluster

# Longer pipelines are tried only on request.
MOST_STAGES = 32
# Tokens of a segment to try.
SEGMENT_TOKENS = (2048, 4096, 8192)


@dataclass(frozen=True)
class Choice:
    """Settings of a run that the search varies.

    Attributes:
        mesh: sizes of the process groups.
        segment_tokens, memory_tokens, activation_tokens: values of ``--tree-segment-tokens``, ``--tree-memory-tokens``
            and ``--tree-activation-tokens``; None for the default.
        full_recompute: whether Megatron recomputes every layer.
    """

    mesh: RunMesh
    segment_tokens: int
    memory_tokens: int | None = None
    activation_tokens: int | None = None
    full_recompute: bool = False


def stage_layers(shape: DecoderShape, stages: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each virtual stage: equal numbers if possible, else ``--pipeline-model-parallel-layout auto``.

    Returns None if there are fewer layers than virtual stages.
    """
    virtual = stages * chunks
    if shape.num_layers < virtual:
        return None
    if shape.num_layers % virtual == 0:
        return (shape.num_layers // virtual,) * virtual
    return auto_layers(shape, stages, chunks)


@lru_cache(maxsize=256)
def auto_layers(shape: DecoderShape, stages: int, chunks: int) -> tuple[int, ...]:
    """Layers of each virtual stage by ``--pipeline-model-parallel-layout auto``."""
    cost = CostModel.from_shape(shape)
    layer_seconds = cost.seconds_per_token / shape.num_layers
    return tuple(layers_per_stage(shape.num_layers, stages * chunks, layer_seconds, cost.seconds_per_edge, stages))


@dataclass(frozen=True)
class MeshSizes:
    """Sizes of a mesh, without the number of its replicas, which follows from the number of GPUs.

    Attributes:
        tensor, pipeline, chunks, experts: tensor parallelism, pipeline stages, model chunks per stage, expert
            parallelism.
        expert_tensor: tensor parallelism of the experts; None for ``tensor``.
        sequence_parallel: None for True with tensor parallelism.
        layers: layers of each virtual stage; None for ``stage_layers``.
        context: context parallelism.
    """

    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    experts: int = 1
    expert_tensor: int | None = None
    sequence_parallel: bool | None = None
    layers: tuple[int, ...] | None = None
    context: int = 1


def make_mesh(shape: DecoderShape, num_gpus: int, sizes: MeshSizes | None = None) -> RunMesh:
    """Create the mesh of ``num_gpus`` processes. Raises InputError naming the flag if the sizes do not fit."""
    sizes = sizes or MeshSizes()
    tensor, pipeline, chunks, experts = sizes.tensor, sizes.pipeline, sizes.chunks, sizes.experts
    context = sizes.context
    if num_gpus % (tensor * context * pipeline):
        shown = f" x --context-parallel-size {context}" if context > 1 else ""
        raise InputError(
            f"--tensor-model-parallel-size {tensor}{shown} x --pipeline-model-parallel-size {pipeline} does not divide "
            f"--num-gpus {num_gpus}"
        )
    refusal = context_refusal(tensor, context, shape.num_attention_heads, shape.num_query_groups)
    if refusal is None and shape.mixer is not None:
        refusal = shape.mixer.heads_refusal(tensor, context)
    if refusal is not None:
        raise InputError(refusal)
    divided = {
        "--num-query-groups": shape.num_query_groups,
        "--num-attention-heads": shape.num_attention_heads,
        "--ffn-hidden-size": shape.ffn_hidden_size,
    }
    for flag, value in divided.items():
        if value % tensor:
            raise InputError(f"--tensor-model-parallel-size {tensor} does not divide {flag} {value}")
    layers = sizes.layers or stage_layers(shape, pipeline, chunks)
    if layers is None:
        raise InputError(f"{shape.num_layers} layers are fewer than {pipeline} x {chunks} pipeline stages")
    data = num_gpus // (tensor * context * pipeline)
    expert_tensor = 1
    if shape.num_experts:
        expert_tensor = tensor if sizes.expert_tensor is None else sizes.expert_tensor
    if experts > 1 and (not shape.num_experts or shape.num_experts % experts):
        raise InputError(f"--expert-model-parallel-size {experts} does not divide the experts of the model")
    if shape.num_experts:
        group = experts * expert_tensor
        of_stage = tensor * context * data
        if of_stage % group or (group % tensor and tensor % group) or shape.expert_width % expert_tensor:
            raise InputError(
                f"--expert-model-parallel-size {experts} x --expert-tensor-parallel-size {expert_tensor} does not fit "
                f"the {of_stage} ranks of a stage, {tensor} of them a tensor group"
            )
    sequence = tensor > 1 if sizes.sequence_parallel is None else sizes.sequence_parallel
    return RunMesh(tensor, pipeline, data, layers, chunks, experts, expert_tensor, sequence, context)


@dataclass(frozen=True)
class SearchSpace:
    """The choices to try. None means all powers of two.

    Attributes:
        segment_tokens: None for ``SEGMENT_TOKENS`` of each rank that divides a segment.
        context: None also limits tensor and context ranks together to a node.
        memory_tokens, activation_tokens: see ``Choice``.
        recompute: "tree" keeps as many activations as fit, "full" lets Megatron recompute every layer.
    """

    segment_tokens: Sequence[int] | None = None
    tensor: Sequence[int] | None = None
    pipeline: Sequence[int] | None = None
    chunks: Sequence[int] = (1, 2)
    experts: Sequence[int] | None = None
    memory_tokens: int | None = None
    activation_tokens: int | None = None
    context: Sequence[int] | None = None
    recompute: Sequence[str] = ("tree", "full")


def possible_choices(shape: DecoderShape, cluster: Cluster, space: SearchSpace | None = None) -> Iterator[Choice]:
    """Yield all choices of these sizes that the model and the cluster allow."""
    space = space or SearchSpace()
    gpus, memory_tokens = cluster.num_gpus, space.memory_tokens
    expert_sizes = (space.experts or _powers(gpus)) if shape.num_experts else (1,)
    for t in space.tensor or _powers(min(cluster.gpus_per_node, gpus)):
        for p in space.pipeline or _powers(min(gpus, MOST_STAGES)):
            contexts = space.context or _powers(min(cluster.gpus_per_node, gpus) // t)
            for c, v, e in product(contexts, space.chunks if p > 1 else (1,), expert_sizes):
                meshes = _meshes(shape, gpus, MeshSizes(t, p, v, e, context=c))
                segment_sizes = space.segment_tokens or [size * c for size in SEGMENT_TOKENS]
                for mesh, size, kind in product(meshes, segment_sizes, space.recompute):
                    is_full, kept = kind == "full", space.activation_tokens
                    yield Choice(mesh, size, memory_tokens, None if is_full else kept, is_full)


def _meshes(shape: DecoderShape, gpus: int, sizes: MeshSizes) -> Iterator[RunMesh]:
    """Yield the meshes of these sizes, with equal stages and with stages balanced by the cost model."""
    p, v = sizes.pipeline, sizes.chunks
    if shape.num_layers < p * v:
        return
    divisions = {stage_layers(shape, p, v), auto_layers(shape, p, v)} if p > 1 else {(shape.num_layers,)}
    for expert_tensor in sorted({1, sizes.tensor}) if shape.num_experts else (None,):
        for layers in sorted(divisions):
            try:
                yield make_mesh(shape, gpus, replace(sizes, expert_tensor=expert_tensor, layers=layers))
            except InputError:
                continue


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]
