"""verl's configuration classes for this engine; the YAML files in ``hydra/`` name them as ``_target_``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import ActorConfig, CriticConfig, EngineConfig

BACKEND = "megatron_dta"


@dataclass
class MegatronDtaEngineConfig(EngineConfig):
    """Settings of the tree engine. Names are those of verl's Megatron engine or of this project's flags.

    Attributes:
        dtype: "bfloat16", "float32" or "float64" (for tests of exactness).
        virtual_pipeline_model_parallel_size: model chunks of a pipeline rank; None for one.
        tree_*: see ``megatron_dta.core.config.TreeConfig``.
        loss_scope: "sequences" calls the loss function on groups of sequences whose last tokens were computed together;
            it must be additive over sequences. "mini_batch" computes the loss of all rows of a data-parallel rank at
            once, for losses that compare rows; that costs another forward pass. "auto" takes "mini_batch" for the
            losses of verl that need it.
        override_settings: other settings of this project by field name, such as ``recompute_granularity``.
    """

    strategy: str = BACKEND
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    tree_mode: str = "dta"
    tree_segment_tokens: int | None = None
    tree_memory_tokens: int | None = None
    tree_activation_tokens: int | None = None
    tree_memory_gib: float | None = None
    loss_scope: str = "auto"
    override_settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strategy != BACKEND:
            raise ValueError(f"strategy={self.strategy}: must be {BACKEND} for this engine")
        if self.loss_scope not in ("auto", "sequences", "mini_batch"):
            raise ValueError(f"loss_scope={self.loss_scope}: choose from auto, sequences, mini_batch")


@dataclass
class MegatronDtaActorConfig(ActorConfig):
    """Settings of actor and reference; ``megatron_dta`` holds those of the engine."""

    strategy: str = BACKEND
    megatron_dta: MegatronDtaEngineConfig = field(default_factory=MegatronDtaEngineConfig)
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron_dta


@dataclass
class MegatronDtaCriticConfig(CriticConfig):
    """Settings of the critic; ``megatron_dta`` holds those of the engine."""

    strategy: str = BACKEND
    megatron_dta: MegatronDtaEngineConfig = field(default_factory=MegatronDtaEngineConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron_dta
