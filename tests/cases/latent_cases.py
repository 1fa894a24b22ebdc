"""Small models with latent attention that tests share, as DeepSeek V3, Moonlight and Kimi K2 have it."""

from dataclasses import replace

import torch

from lora_cases import LORA
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.families.latent_attention.sizes import Sizes

SIZES = Sizes(num_heads=4, kv_lora_rank=12, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=5)
LATENT = dict(
    mixer=SIZES, num_query_groups=4, kv_channels=10, untie_embeddings_and_output_weights=True, norm_epsilon=1e-5
)  # fmt: skip
# Queries of low rank, and positions beyond the original length, which also sharpen the softmax.
DEEPSEEK = LATENT | dict(
    mixer=replace(SIZES, q_lora_rank=8), position_embedding_type="yarn", rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=16, mscale_all_dim=1.0,
)  # fmt: skip
EXPERTS = dict(
    num_layers=2, num_experts=8, moe_router_topk=4, moe_layer_freq="[0]*1+[1]*1", moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=24, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=4, moe_router_group_topk=2, moe_router_enable_expert_bias=True,
)  # fmt: skip
MODELS = {"moonlight": LATENT, "deepseek": DEEPSEEK, "experts": DEEPSEEK | EXPERTS}
# Biases of experts stay as they are beside adapters.
ADAPTERS = LORA | dict(moe_router_bias_update_rate=0.0)

# The sizes of DeepSeek V3's heads.
WIDE = DEEPSEEK | dict(
    mixer=Sizes(num_heads=4, q_lora_rank=64, kv_lora_rank=96), hidden_size=128, ffn_hidden_size=192, kv_channels=192,
    init_method_std=0.06,
)  # fmt: skip


def latent_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Parameters with norms away from 1, biases of experts that differ, and adapters that change what they adapt."""
    built = build_model(model, initialize_parallel(seed))
    weights = {name: p.detach() for name, p in built.named_parameters()}
    for name, weight in weights.items():
        if weight.ndim == 1 or name.endswith("lora_B"):
            weight += 0.3 * torch.randn_like(weight)
    for name, bias in built.named_buffers():
        if name.endswith("expert_bias"):
            weights[name] = torch.randn_like(bias, dtype=torch.float32) / 8
    return weights
