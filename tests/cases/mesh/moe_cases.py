"""Small models with experts, and the outcome of training each sample alone."""

import numpy as np
import torch

from conftest import seed_all
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model, build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.extras.parity import random_training_samples, run_stock
from megatron_dta.extras.parity.plain_router import PlainRouter
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config

QWEN3_MOE = QWEN3 | {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 20, "moe_router_pre_softmax": False}
MIXTRAL = {"num_experts": 4, "moe_router_topk": 2, "untie_embeddings_and_output_weights": True}
DEEPSEEK = {"num_layers": 3, "num_experts": 8, "moe_router_topk": 4, "moe_layer_freq": "[0]*1+[1]*2"}
DEEPSEEK |= {"moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 16, "moe_router_group_topk": 2}
DEEPSEEK |= {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4}
DEEPSEEK |= {"moe_router_enable_expert_bias": True}
QWEN2_MOE = {"add_qkv_bias": True, "num_experts": 3, "moe_router_topk": 1, "moe_router_pre_softmax": True}
QWEN2_MOE |= {"moe_layer_freq": "2", "moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
GPT_MOE = {"normalization": "LayerNorm", "swiglu": False, "num_experts": 3, "moe_router_topk": 3}
BALANCE = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.02}
QWEN3_BALANCED = QWEN3_MOE | BALANCE
DEEPSEEK_BALANCED = DEEPSEEK | BALANCE | {"num_layers": 2, "moe_layer_freq": "[0,1]"}
MODELS = {"qwen3": QWEN3_MOE, "mixtral": MIXTRAL, "deepseek": DEEPSEEK, "qwen2": QWEN2_MOE, "gpt": GPT_MOE}
BALANCED_MODELS = MODELS | {"qwen3-balanced": QWEN3_BALANCED, "deepseek-balanced": DEEPSEEK | BALANCE}
CUTS = [("dense", 9, None), ("dense", 64, 0), ("packed", 30, None), ("packed", 30, 0), ("dta", 6, 12), ("dta", 9, 0)]


def moe_weights(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Parameters, and biases of experts that differ."""
    built = build_model(model, initialize_parallel(seed))
    weights = {name: p.detach() for name, p in built.named_parameters()}
    for name, bias in built.named_buffers():
        if name.endswith("expert_bias"):
            weights[name] = torch.randn_like(bias, dtype=torch.float32) / 8
    return weights


def make_reference(name: str) -> tuple:
    """Model, weights, samples that use every expert, and the outcome of training each of them alone."""
    samples = random_training_samples(branching_sequences(seed_all(17), count=6, longest=16), seed=17)
    model = model_config(**BALANCED_MODELS[name])
    weights = moe_weights(model, seed=5)
    return model, weights, samples, run_stock(model, weights, samples, GRPO, TEMPERATURE)


def run_plain_router(model: ModelConfig, weights: dict, samples: list) -> torch.nn.Module:
    """The stock model after all samples, each run alone: its routers hold their loads and losses."""
    stock = build_stock_model(model, torch.device("cpu"), PlainRouter)
    stock.load_state_dict(weights)
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids[: sample.needed_length].astype(np.int64))[None]
        length = tokens.shape[1]
        hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        stock(tokens, torch.arange(length)[None], hidden_from)
    return stock


def updated_expert_biases(model: ModelConfig, weights: dict, samples: list) -> dict[str, torch.Tensor]:
    """The biases of experts after a step."""
    biases = {}
    for name, module in run_plain_router(model, weights, samples).named_modules():
        if isinstance(module, PlainRouter):
            loads, key = module.loads.double(), f"{name}.expert_bias"
            biases[key] = weights[key] + model.moe_router_bias_update_rate * torch.sign(loads.mean() - loads).float()
    return biases
