"""Provides the engine's extensions from the extras, which are imported only where a run uses them."""

from __future__ import annotations

from megatron_dta.core.extensions import (
    EXPERT_PARALLEL,
    KV_OFFLOAD,
    TRANSFORMER_ENGINE,
    ExpertParallel,
    TransformerEngine,
)


def attach_extras() -> None:
    """Let models and plans use experts on several ranks, K/V on the host, and Transformer Engine."""
    EXPERT_PARALLEL.provide(_expert_parallel)
    KV_OFFLOAD.provide(_host_slots)
    TRANSFORMER_ENGINE.provide(_transformer_engine)


def _expert_parallel() -> ExpertParallel:
    from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
    from megatron_dta.extras.expert_parallel.planning.synchronized_plan import synchronize
    from megatron_dta.extras.expert_parallel.row_exchange import RowExchange

    return ExpertParallel(RowExchange, synchronize, GroupStep)


def _host_slots() -> type:
    from megatron_dta.extras.kv_offload.pool import HostSlots

    return HostSlots


def _transformer_engine() -> TransformerEngine:
    from megatron_dta.extras.transformer_engine.layers import use_transformer_engine, weights_quantized_once

    return TransformerEngine(use_transformer_engine, weights_quantized_once)
