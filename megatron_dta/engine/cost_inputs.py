"""Derives the planner's cost inputs from a built model: its shape for a cost file, and byte counts."""

from __future__ import annotations

import torch
from megatron.core.transformer import TransformerConfig

from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.file import CostShape
from megatron_dta.planning.costs.segment_bytes import SegmentBytes


def cost_shape(config: TransformerConfig, vocab_size: int, dtype: torch.dtype) -> CostShape:
    """The shape for which a measurement of the model is valid; raises InputError for a model with experts."""
    if config.num_moe_experts is not None:
        raise InputError("--cost-model: models with experts cannot be measured; leave it out")
    return CostShape(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=vocab_size,
        swiglu=config.gated_linear_unit,
        dtype=str(dtype).removeprefix("torch."),
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
    )


def counted_bytes(
    config: TransformerConfig,
    vocab_size: int,
    dtype: torch.dtype,
    logit_rows: int,
    fused: bool = False,
    fused_attention: bool = False,
    in_buffers: bool = False,
) -> SegmentBytes:
    """Bytes for each token of the model, counted instead of measured; raises InputError for a model with experts.

    Args:
        logit_rows: rows of logits that exist at once.
        fused, fused_attention: whether layers and attention run on the kernels. Layers without RMSNorm and SwiGLU keep
            the same tensors as Megatron's modules even on the kernels.
        in_buffers: whether weight gradients are accumulated in buffers (``main_grad``).
    """
    if config.num_moe_experts is not None:
        raise InputError("--tree-memory-gib: how many tokens an expert gets is not known ahead; leave it out")
    return SegmentBytes.of_shape(
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        vocab_size=vocab_size,
        swiglu=config.gated_linear_unit,
        element_bytes=dtype.itemsize,
        tensor_size=config.tensor_model_parallel_size,
        sequence_parallel=config.sequence_parallel,
        logit_rows=logit_rows,
        fused=fused and config.normalization == "RMSNorm" and config.gated_linear_unit,
        fused_attention=fused_attention,
        in_buffers=in_buffers,
    )
