"""The engine that ``--rollout-engine`` names."""

from __future__ import annotations

from megatron_dta.config import SamplingConfig
from megatron_dta.errors import InputError
from megatron_dta.model import Model
from megatron_dta.sampling.engines.in_process import InProcessEngine
from megatron_dta.sampling.engines.interface import RolloutEngine


def build_engine(config: SamplingConfig, model: Model) -> RolloutEngine:
    """An engine that samples from ``model``; ``InputError`` for one that does not exist yet."""
    if config.rollout_engine != "in-process":
        raise InputError(f"--rollout-engine {config.rollout_engine} is not supported yet; use in-process")
    return InProcessEngine(
        model,
        config.inference_max_requests,
        config.inference_dynamic_batching_block_size,
        config.inference_dynamic_batching_buffer_size_gb,
        config.inference_dynamic_batching_max_tokens,
    )
