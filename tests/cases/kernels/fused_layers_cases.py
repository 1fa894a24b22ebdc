"""Models on the fused layer kernels: the context of one segment, and the bytes that a layer keeps."""

import torch

from megatron_dta.core.config import ModelConfig, ParallelConfig
from megatron_dta.core.model.attention.kv_pool import KVPool, SlotShape
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.shapes.decoder import DecoderShape
from tree_engine_cases import model_config


def fused(dtype: torch.dtype = torch.float32, **settings: object) -> ModelConfig:
    return model_config(dtype, **settings, fused_layer_impl="triton")


def segment_context(model: TreeGPTModel, tokens: int, device: torch.device) -> SegmentContext:
    """The context of a lone segment of one sequence, on the plain attention."""
    config, positions = model.config, torch.arange(tokens, device=device)
    slot = SlotShape(config.num_query_groups, config.kv_channels, config.kv_channels)
    pool = KVPool(config.num_layers, tokens, slot, config.params_dtype, device, True)
    pool.open(slice(0, tokens))
    return SegmentContext(
        position_ids=positions,
        pool=pool,
        layer_rows={layer + 1: layer for layer in range(config.num_layers)},
        slots=slice(0, tokens),
        ancestor_slots=positions[:0],
        query_index=positions,
        key_index=positions,
        key_end=torch.full((tokens,), tokens, device=device),
    )


def layer_bytes(config: ModelConfig, parallel: ParallelConfig | None = None) -> float:
    """Bytes of a token that a fused layer keeps by the formula that plans use."""
    parallel = parallel or ParallelConfig()
    rank = RankTensors(config.params_dtype.itemsize, parallel.tensor_model_parallel_size, parallel.sequence_parallel)
    return SegmentBytes.of_shape(DecoderShape.of(config), rank).kept_per_token_and_layer
