"""Derives the planner's inputs from a built model: its sizes, its costs and its bytes."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer import TransformerConfig

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.planning.costs.gpus import LayerSplit, gpu_cost_model, gpu_named
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.shapes.decoder import DecoderShape


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
        mixer=config.mixer,
        mixer_layers=config.mixer_layers,
        hybrid_layer_pattern=config.hybrid_layer_pattern,
        attention_output_gate=config.attention_output_gate,
    )


def why_not_predicted(model: TreeGPTModel) -> str | None:
    """Why time and memory of a segment cannot be predicted for the model's layers; None if they can.

    Summed over all ranks, a token has one row for each of its experts, whichever they are; each rank is expected to
    get about an equal share.
    """
    if model.config.num_moe_experts is not None and model.counts_on_host:
        return "experts are counted as grouped products on the kernels only"
    if model.config.mixer is not None and not model.has_fused_layers and next(model.parameters()).is_cuda:
        return "layers with another mixer are counted on the kernels only (fused_layer_impl, float32 or 16 bits)"
    return None


def costs_of_gpu(
    model: TreeGPTModel, shape: DecoderShape, segment_tokens: int, context_size: int = 1
) -> CostModel | None:
    """The cost model of the GPU that holds ``model``, one of ``context_size`` that divide the tokens of a segment; None
    on a CPU and if its experts cannot be predicted.
    """
    config, parameter = model.config, next(model.parameters())
    if parameter.device.type != "cuda" or why_not_predicted(model) is not None:
        return None
    gpu, _ = gpu_named(torch.cuda.get_device_name(parameter.device))
    size = config.tensor_model_parallel_size
    is_plain = shape.num_experts is None and shape.mixer is None
    direct = model.has_fused_layers and size == 1 and is_plain
    ranks, of_experts = config.expert_model_parallel_size, config.expert_tensor_parallel_size or 1
    is_16_bit = parameter.dtype.itemsize == 2
    split = LayerSplit(is_16_bit, size, config.sequence_parallel, direct, ranks, context_size, of_experts)
    return gpu_cost_model(shape, gpu, split, segment_tokens)


def counted_bytes(
    model: TreeGPTModel, shape: DecoderShape, rank: RankTensors, layers: range | None = None
) -> SegmentBytes:
    """Bytes for each token in ``layers`` of the model, None for all.

    Layers without RMSNorm and SwiGLU keep the tensors of Megatron's modules even on the kernels, but for those of one
    part. Raises InputError if they cannot be counted.
    """
    reason, config = why_not_predicted(model), model.config
    if reason is not None:
        raise InputError(f"--tree-memory-gib: {reason}; leave it out")
    is_fused = config.gated_linear_unit or shape.hybrid_layer_pattern is not None
    fused = rank.fused and config.normalization == "RMSNorm" and is_fused
    return SegmentBytes.of_shape(shape, replace(rank, fused=fused), layers)
