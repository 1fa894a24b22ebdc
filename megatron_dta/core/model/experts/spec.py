"""Layer specs with experts: Megatron's own, with our router, our exchange of tokens and our experts.

The spec is a ``ModuleSpec`` up to Megatron-Core 0.16 and a ``functools.partial`` later; both are edited here.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.experts.grouped_experts import GroupedExperts
from megatron_dta.core.model.experts.routed_layer import RoutedLayer, TreeMoELayer
from megatron_dta.core.model.experts.router import TreeRouter
from megatron_dta.core.model.experts.weights import SameOnEveryMesh


def expert_settings(model: ModelConfig) -> dict[str, Any]:
    """The expert settings of Megatron's ``TransformerConfig``; the spec decides whether experts are grouped."""
    if model.num_experts is None:
        return {}
    return dict(
        num_moe_experts=model.num_experts,
        moe_router_topk=model.moe_router_topk,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_layer_freq=[int(has_experts) for has_experts in model.moe_layers],
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=model.moe_shared_expert_gate,
        moe_router_score_function=model.moe_router_score_function,
        moe_router_pre_softmax=model.moe_router_pre_softmax,
        moe_router_topk_scaling_factor=model.moe_router_topk_scaling_factor,
        moe_router_num_groups=model.moe_router_num_groups,
        moe_router_group_topk=model.moe_router_group_topk,
        moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=model.moe_router_bias_update_rate,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_token_dispatcher_type="alltoall",
    )


def expert_layer_spec(model: ModelConfig, router: type | None = TreeRouter) -> ModuleSpec:
    """Megatron's spec of a layer with experts; ``router`` replaces Megatron's router unless it is None.

    With our router, experts are grouped products if the model asks for them; with Megatron's, they run one by one.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts, qk_layernorm=model.qk_layernorm, normalization=model.normalization
    )
    mlp = spec.submodules.mlp
    if router is not None:
        feed_forward_submodules(mlp).router = router
    if router is TreeRouter:
        spec.module = RoutedLayer
        if isinstance(mlp, functools.partial):
            spec.submodules.mlp = functools.partial(TreeMoELayer, *mlp.args, **mlp.keywords)
        else:
            mlp.module = TreeMoELayer
    is_grouped = model.moe_grouped_gemm and router is TreeRouter
    replace_experts(spec, SequentialMLP, GroupedExperts if is_grouped else SameOnEveryMesh)
    return spec


def feed_forward_submodules(mlp: Any) -> Any:
    """Submodules of the feed-forward part: in a ``ModuleSpec`` in Megatron-Core 0.16, in a partial in 0.19."""
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def replace_experts(spec: ModuleSpec, old: type[SequentialMLP], new: type[SequentialMLP]) -> None:
    """Replace experts of class ``old`` in a layer's spec by class ``new``; any other spec is unchanged."""
    submodules = feed_forward_submodules(spec.submodules.mlp)
    experts = getattr(submodules, "experts", None)
    if isinstance(experts, functools.partial) and experts.func is old:
        submodules.experts = functools.partial(new, *experts.args, **experts.keywords)
    elif getattr(experts, "module", None) is old:
        experts.module = new
