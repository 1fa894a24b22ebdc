"""Derives the planner's inputs from a built model: its sizes, and the properties that a cost file must match."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer import TransformerConfig

from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.decoder_shape import DecoderShape
from megatron_dta.planning.costs.file import CostShape
from megatron_dta.planning.costs.gpus import LayerSplit, gpu_cost_model, gpu_named
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.segment_bytes import RankTensors, SegmentBytes


def decoder_shape(config: TransformerConfig, vocab_size: int) -> DecoderShape:
    """The sizes of a built model."""
    has_experts = config.num_moe_experts is not None
    return DecoderShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=vocab_size,
        swiglu=config.gated_linear_unit,
        num_experts=config.num_moe_experts,
        moe_router_topk=config.moe_router_topk,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size,
        moe_shared_expert_intermediate_size=config.moe_shared_expert_intermediate_size,
        moe_layers=tuple(map(bool, config.moe_layer_freq)) if has_experts else (),
    )


def cost_shape(config: TransformerConfig, shape: DecoderShape, dtype: torch.dtype) -> CostShape:
    """The properties for which a measurement of the model is valid; raises InputError for a model with experts."""
    if shape.num_experts is not None:
        raise InputError("--cost-model: models with experts cannot be measured; leave it out")
    return CostShape.of(
        shape, str(dtype).removeprefix("torch."), config.tensor_model_parallel_size, config.sequence_parallel
    )


def costs_of_gpu(
    config: TransformerConfig, shape: DecoderShape, parameter: torch.Tensor, fused: bool, segment_tokens: int
) -> CostModel | None:
    """The cost model of the GPU that holds ``parameter``; None on a CPU and for a model with experts."""
    if parameter.device.type != "cuda" or shape.num_experts is not None:
        return None
    gpu, _ = gpu_named(torch.cuda.get_device_name(parameter.device))
    size = config.tensor_model_parallel_size
    split = LayerSplit(parameter.dtype.itemsize == 2, size, config.sequence_parallel, fused and size == 1)
    return gpu_cost_model(shape, gpu, split, segment_tokens)


def counted_bytes(config: TransformerConfig, shape: DecoderShape, rank: RankTensors) -> SegmentBytes:
    """Bytes for each token of the model, counted instead of measured; raises InputError for a model with experts.

    Layers without RMSNorm and SwiGLU keep the tensors of Megatron's modules even on the kernels.
    """
    if shape.num_experts is not None:
        raise InputError("--tree-memory-gib: how many tokens an expert gets is not known ahead; leave it out")
    fused = rank.fused and config.normalization == "RMSNorm" and config.gated_linear_unit
    return SegmentBytes.of_shape(shape, replace(rank, fused=fused))
