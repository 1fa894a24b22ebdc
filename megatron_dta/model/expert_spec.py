"""Layer specs with experts: Megatron's own, with our router, and experts whose first weights do not depend on the mesh.

The spec is a ``ModuleSpec`` up to Megatron-Core 0.16 and a ``functools.partial`` later; both are edited here.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dta.config import ModelConfig
from megatron_dta.model.router import RoutedLayer, TreeRouter


def expert_settings(model: ModelConfig) -> dict[str, Any]:
    """The part of Megatron's ``TransformerConfig`` that is about experts."""
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
        moe_router_dtype=model.moe_router_dtype,
        moe_router_enable_expert_bias=model.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=model.moe_router_bias_update_rate,
        moe_router_load_balancing_type=model.moe_router_load_balancing_type,
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_z_loss_coeff=model.moe_z_loss_coeff,
        moe_grouped_gemm=model.moe_grouped_gemm,
        moe_token_dispatcher_type=model.moe_token_dispatcher_type,
    )


def expert_layer_spec(model: ModelConfig, router: type | None = TreeRouter) -> ModuleSpec:
    """Megatron's spec of a layer with experts; ``router`` takes the place of its own, which None leaves."""
    spec = get_gpt_layer_local_spec(
        num_experts=model.num_experts,
        moe_grouped_gemm=model.moe_grouped_gemm,
        qk_layernorm=model.qk_layernorm,
        normalization=model.normalization,
    )
    mlp = spec.submodules.mlp
    submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
    if router is not None:
        submodules.router = router
    if router is TreeRouter:
        spec.module = RoutedLayer
    experts = submodules.experts
    if isinstance(experts, functools.partial) and experts.func is SequentialMLP:
        submodules.experts = functools.partial(SameOnEveryMesh, *experts.args, **experts.keywords)
    elif getattr(experts, "module", None) is SequentialMLP:
        experts.module = SameOnEveryMesh
    return spec


class SameOnEveryMesh(SequentialMLP):
    """Megatron's experts, each with the first weights that it would have on one process.

    On a CPU the random state decides the weights. A rank draws those of the experts before and after its own too and
    drops them, so its experts differ from other ranks', and what is drawn next is the same on all.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any, pg_collection: Any, **names: Any
    ) -> None:
        rank, size = pg_collection.ep.rank(), pg_collection.ep.size()
        others = num_local_experts if config.use_cpu_initialization and size > 1 else 0
        shape = copy.copy(config)
        shape.ffn_hidden_size = config.moe_ffn_hidden_size

        def draw(num_experts: int) -> None:
            for _ in range(num_experts):
                MLP(
                    shape,
                    submodules,
                    is_expert=True,
                    ffn_hidden_size=config.moe_ffn_hidden_size,
                    tp_group=pg_collection.expt_tp,
                )

        draw(rank * others)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **names)
        draw((size - 1 - rank) * others)
        if pg_collection.expt_tp.size() != pg_collection.tp.size():
            # Their gradients are summed over other ranks than the rest's. Up to 0.16 Megatron says so only where the
            # experts are divided among ranks, and lets whole ones on the ranks of a tensor group drift apart.
            for parameter in self.parameters():
                parameter.allreduce = False
