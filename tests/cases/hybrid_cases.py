"""Small hybrid models that tests share: gated delta net beside gated attention, as in Qwen3-Next and Qwen3.5."""

from pathlib import Path
from typing import Any

import torch

from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.model.hybrid.decode_states import DecodeStates
from megatron_dta.families.gated_delta_net.sizes import Sizes
from megatron_dta.families.mamba2 import sizes as mamba2
from megatron_dta.training.huggingface.config.config_output import config_from_settings, write_template

SIZES = Sizes(linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2, linear_num_value_heads=4)
HYBRID = dict(
    num_layers=3,
    mixer=SIZES,
    mixer_layer_freq="[1,0,1]",
    attention_output_gate=True,
    apply_layernorm_1p=True,
    qk_layernorm=True,
    rotary_percent=0.5,
    norm_epsilon=1e-6,
)
# As in Nemotron-H: layers of one part, and heads in groups.
NEMOTRON = dict(
    num_layers=5,
    hybrid_layer_pattern="M-M*M",
    mixer=mamba2.Sizes(mamba_num_heads=8, mamba_head_dim=3, mamba_state_dim=6, mamba_num_groups=4, mamba_conv_kernel=4),
    position_embedding_type="none",
    untie_embeddings_and_output_weights=True,
    squared_relu=True,
    swiglu=False,
    qk_layernorm=False,
    disable_bias_linear=True,
)
NEMOTRON_EXPERTS = NEMOTRON | dict(
    num_layers=6,
    hybrid_layer_pattern="MEM*-E",
    num_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_shared_expert_intermediate_size=16,
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_num_groups=4,
    moe_router_group_topk=1,
)
EXPERTS = dict(
    num_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=16,
    moe_shared_expert_intermediate_size=12,
    moe_shared_expert_gate=True,
)


def hybrid_model(vocab_size: int, **changes: Any) -> ModelConfig:
    """A hybrid model without experts, with ``changes``."""
    shape = dict(hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=8)
    plain = dict(swiglu=True, disable_bias_linear=True, max_position_embeddings=32)
    plain["untie_embeddings_and_output_weights"] = True
    return ModelConfig(**(HYBRID | shape | plain | dict(vocab_size=vocab_size) | changes))


def hybrid_flags(folder: Path, vocab_size: int, **changes: Any) -> str:
    """Flags of a run of such a model, whose config.json is written to ``folder``."""
    write_template(folder, config_from_settings(hybrid_model(vocab_size, **changes)), None)
    return f"--hf-checkpoint {folder} --lr 1e-2"


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


def poisoned(self: DecodeStates, num_slots: int, grow: Any = DecodeStates.grow) -> None:
    """``grow`` whose new slots begin with NaN."""
    before = self.num_slots
    grow(self, num_slots)
    for tensor in (*self.states.values(), *self.rows.values()):
        tensor[before:] = float("nan")
