"""The model layer: the only package that imports Megatron's model classes and the kernels."""

from dta_kernels.logprobs.linear import RowChunk
from dta_kernels.logprobs.logit_chunks import Head
from dta_kernels.logprobs.reverse_kl import TeacherRows
from dta_kernels.tree_attention.plan import AttentionShape
from dta_kernels.tree_attention.reference import accumulation_dtype
from dta_kernels.upload import upload
from megatron_dta.core.model.attention.context import AttentionContext, EmptyContext
from megatron_dta.core.model.attention.kv_pool import KVPool, SlotRuns
from megatron_dta.core.model.attention.segment_attention import SegmentAttentionPlans, choose_attention
from megatron_dta.core.model.attention.segment_context import SegmentContext
from megatron_dta.core.model.attention.token_routing import TokenRouting
from megatron_dta.core.model.build import build_model, build_stock_model
from megatron_dta.core.model.hybrid.gated_delta_net import GatedDeltaNet
from megatron_dta.core.model.hybrid.segment_states import StepStates
from megatron_dta.core.model.hybrid.state_pool import StatePool
from megatron_dta.core.model.layers.lora import LoraAdapter, adapters_of, without_adapters
from megatron_dta.core.model.parallel.context_group import ContextGroup, context_group, context_sizes
from megatron_dta.core.model.parallel.mesh import (
    Mesh,
    current_mesh,
    destroy_parallel,
    initialize_parallel,
    training_mesh,
)
from megatron_dta.core.model.parallel.stage_channels import StageChannels, stage_channels
from megatron_dta.core.model.parallel.staged_model import Model, StagedModel
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.core.model.value_model import TreeValueModel

__all__ = [
    "AttentionContext",
    "AttentionShape",
    "ContextGroup",
    "EmptyContext",
    "GatedDeltaNet",
    "Head",
    "KVPool",
    "LoraAdapter",
    "Mesh",
    "Model",
    "RowChunk",
    "SegmentAttentionPlans",
    "SegmentContext",
    "SlotRuns",
    "StageChannels",
    "StagedModel",
    "StatePool",
    "StepStates",
    "TeacherRows",
    "TokenRouting",
    "TreeGPTModel",
    "TreeValueModel",
    "accumulation_dtype",
    "adapters_of",
    "build_model",
    "build_stock_model",
    "choose_attention",
    "context_group",
    "context_sizes",
    "current_mesh",
    "destroy_parallel",
    "initialize_parallel",
    "stage_channels",
    "training_mesh",
    "upload",
    "without_adapters",
]
