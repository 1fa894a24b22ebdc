"""Small hybrid models that tests share: gated delta net beside gated attention, as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch

HYBRID = dict(
    num_layers=3,
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq="[1,0,1]",
    linear_conv_kernel_dim=4,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    attention_output_gate=True,
    apply_layernorm_1p=True,
    qk_layernorm=True,
    rotary_percent=0.5,
    norm_epsilon=1e-6,
)
FLAGS = (
    "--num-layers 3 --hidden-size 24 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--kv-channels 8 --swiglu --disable-bias-linear --max-position-embeddings 32 --lr 1e-2 --norm-epsilon 1e-6 "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,0,1] --linear-key-head-dim 6 "
    "--linear-value-head-dim 5 --linear-num-key-heads 2 --linear-num-value-heads 4 --attention-output-gate "
    "--apply-layernorm-1p --qk-layernorm --rotary-percent 0.5 --untie-embeddings-and-output-weights"
)
EXPERTS = dict(
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=12,
    moe_shared_expert_gate=True,
)


def spread(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The weights with norms away from 0 and 1, which could hide a factor, and decay so slow that states matter."""
    generator = torch.Generator().manual_seed(seed)
    for name in weights:
        weight = weights[name]
        if weight.ndim == 1:
            weight += 0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight)
        if name.endswith("A_log"):
            weight -= 4.0
    return weights
