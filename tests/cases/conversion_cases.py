"""Small random Hugging Face checkpoints of every architecture, and stock Megatron models with the same weights."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from megatron_dta.core.config import ModelConfig
from megatron_dta.training.huggingface.config.config import (
    architecture,
    model_settings,
    read_hf_config,
    settings_from_hf,
)
from megatron_dta.training.huggingface.files import SafetensorsFolder
from megatron_dta.training.huggingface.mappings import ModelShape

COMMON = dict(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    use_cache=False,
    attn_implementation="eager",
)
EXPERTS = dict(num_experts_per_tok=2, output_router_logits=False, router_aux_loss_coef=0.0)
# Class prefix in transformers and what differs from COMMON.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True, num_key_value_heads=4)),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=8)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=8)),
    "qwen3-tied": ("Qwen3", dict(head_dim=10, tie_word_embeddings=True)),
    "mixtral": ("Mixtral", dict(num_local_experts=4, sliding_window=None, **EXPERTS)),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(num_experts=6, moe_intermediate_size=20, head_dim=8, norm_topk_prob=True, **EXPERTS),
    ),
    "qwen3-moe-some": (
        "Qwen3Moe",
        dict(num_experts=4, moe_intermediate_size=20, head_dim=8, mlp_only_layers=[1], norm_topk_prob=True, **EXPERTS),
    ),
}
_HYBRID = dict(linear_key_head_dim=6, linear_value_head_dim=5, linear_num_key_heads=2, linear_num_value_heads=4)
_HYBRID |= dict(head_dim=8, layer_types=["linear_attention", "full_attention"])
_SHARED = dict(num_experts=4, moe_intermediate_size=20, shared_expert_intermediate_size=12, **EXPERTS)
_SOME = dict(mlp_only_layers=[1], layer_types=None, num_hidden_layers=4)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", _HYBRID | _SHARED),
    "qwen3-next-some": ("Qwen3Next", _HYBRID | _SHARED | _SOME),
    "qwen3.5": ("Qwen3_5", _HYBRID | dict(tie_word_embeddings=True)),
    "qwen3.5-moe": ("Qwen3_5Moe", _HYBRID | _SHARED),
}
_MAMBA = dict(mamba_num_heads=8, mamba_head_dim=3, ssm_state_size=6, n_groups=4, head_dim=8, num_hidden_layers=4)
_MAMBA |= dict(time_step_min=1e-9, layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"])
HYBRIDS["nemotron-h"] = ("NemotronH", _MAMBA)
_MAMBA_EXPERTS = dict(layers_block_type=["linear_attention", "moe", "full_attention", "moe"], n_routed_experts=4)
_MAMBA_EXPERTS |= dict(moe_intermediate_size=20, moe_shared_expert_intermediate_size=12, routed_scaling_factor=2.5)
HYBRIDS["nemotron-3"] = ("NemotronH", _MAMBA | _MAMBA_EXPERTS)
_LATENT = dict(q_lora_rank=12, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_group=1)
_LATENT |= dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=20, topk_group=1)
HYBRIDS["deepseek-v3"] = ("DeepseekV3", _LATENT | dict(num_key_value_heads=4, first_k_dense_replace=1))
DENSE = [name for name in CASES if "moe" not in name and name != "mixtral"]


def save_huggingface(
    folder: Path, case: str, seed: int, dtype: torch.dtype = torch.float32, shard: str = "20KB"
) -> Any:
    """A random model of a case, saved in several files; norms and biases are random too."""
    import transformers

    prefix, other = (CASES | HYBRIDS)[case]
    torch.manual_seed(seed)
    of_text = "TextConfig" if prefix.startswith("Qwen3_5") else "Config"
    config = getattr(transformers, f"{prefix}{of_text}")(**{**COMMON, **other})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.15)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)))
    words = {"</s>": 0, **{str(word): word for word in range(1, COMMON["vocab_size"])}}
    Tokenizer(WordLevel(words, unk_token="</s>")).save(str(folder / "tokenizer.json"))
    return model.eval()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: values for path in sorted(folder.glob("*.safetensors")) for name, values in load_file(path).items()}


def settings_of(folder: Path) -> dict[str, Any]:
    return model_settings(read_hf_config(folder))


def shape_of(folder: Path) -> ModelShape:
    """The shape, whether or not ``ModelConfig`` knows of experts."""
    settings = settings_of(folder)
    layers, frequency = settings["num_layers"], settings.get("moe_layer_freq", 1)
    known = {field.name for field in dataclasses.fields(ModelShape)}
    experts = [1] * layers if frequency == 1 else frequency
    values = {name: value for name, value in settings.items() if name in known}
    moe_layers = tuple(bool(entry) for entry in experts) if "num_experts" in settings else ()
    return ModelShape(**values, moe_layers=moe_layers)


def architecture_in(folder: Path) -> str:
    return architecture(read_hf_config(folder)).architecture


def to_megatron(source: Path, target: Path) -> Path:
    """Convert a folder; returns the checkpoint itself."""
    from megatron_dta.training.huggingface import convert

    model = ModelConfig(**settings_from_hf(source, {}))
    convert.to_megatron(SafetensorsFolder(source), model, {}, target)
    return target / convert.RELEASE


def to_huggingface(checkpoint: Path, template: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Convert a checkpoint back."""
    from megatron_dta.training.huggingface import convert

    convert.to_huggingface(checkpoint, template, target, dtype)
    return target


def dense_config(folder: Path, **changes: Any) -> ModelConfig:
    """Settings of a folder's model, without its experts."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    settings = settings_of(folder)
    return ModelConfig(
        **{n: v for n, v in settings.items() if n in known and not re.match("num_experts|moe_", n)}, **changes
    )


def stock_model(folder: Path, **mesh: int) -> torch.nn.Module:
    """Megatron's own model of a folder's configuration, with experts if it has some."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron_dta.core.model.build import build_stock_model, model_arguments, transformer_config
    from megatron_dta.core.model.parallel.mesh import initialize_parallel

    config, settings = dense_config(folder), settings_of(folder)
    device = initialize_parallel(0) if not mesh else torch.device("cpu")
    if "num_experts" not in settings:
        return build_stock_model(config, device)
    experts = dataclasses.replace(
        transformer_config(config),
        num_moe_experts=settings["num_experts"],
        moe_router_topk=settings["moe_router_topk"],
        moe_router_pre_softmax=settings["moe_router_pre_softmax"],
        moe_ffn_hidden_size=settings["moe_ffn_hidden_size"],
        moe_layer_freq=[int(entry) for entry in shape_of(folder).moe_layers],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        **mesh,
    )
    spec = get_gpt_decoder_block_spec(experts, use_transformer_engine=False)
    return GPTModel(experts, spec, **model_arguments(config)).to(device)
