"""The router of DeepSeek V3, which Nemotron-H took over, out of a config.json."""

from __future__ import annotations

from megatron_dta.training.huggingface.config.values import HfValues


def sigmoid_router(values: HfValues) -> dict[str, object]:
    """The settings of experts with this router; ``InputError`` for what Megatron's cannot do."""
    chosen, factor = values.integer("num_experts_per_tok"), values.number("routed_scaling_factor")
    if not values.flag("norm_topk_prob") or chosen == 1:
        raise values.error(
            "supported are several experts for each token (num_experts_per_tok), with norm_topk_prob true"
        )
    groups, of_token = (1 if values.get(key) is None else values.integer(key) for key in ("n_group", "topk_group"))
    if groups > 1 and chosen != 2 * of_token:
        # transformers ranks groups by the sum of their best two experts, Megatron by that of their share of a token's.
        raise values.error(
            f"topk_group {of_token} is not supported with num_experts_per_tok {chosen}, but {chosen / 2:g}"
        )
    return {
        "num_experts": values.integer("n_routed_experts"),
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": values.integer("moe_intermediate_size"),
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": of_token if groups > 1 else None,
        "moe_router_enable_expert_bias": True,
        # As the models were trained at last; a run may balance the load again.
        "moe_router_bias_update_rate": 0.0,
    }
