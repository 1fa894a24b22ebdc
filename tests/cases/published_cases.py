"""Small folders with the layout of published ones: text model, vision tower, ``mtp.*``, nested config.json, shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, VOCABULARY, WIDTH = 32, 259, 16
_TEXT: dict[str, Any] = dict(
    attention_bias=False,
    attention_dropout=0.0,
    attn_output_gate=True,
    dtype="bfloat16",
    eos_token_id=257,
    full_attention_interval=2,
    head_dim=8,
    hidden_act="silu",
    hidden_size=HIDDEN,
    initializer_range=0.02,
    layer_types=["linear_attention", "full_attention"],
    linear_conv_kernel_dim=4,
    linear_key_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_value_head_dim=8,
    mamba_ssm_dtype="float32",
    max_position_embeddings=512,
    mtp_num_hidden_layers=1,
    mtp_use_dedicated_embeddings=False,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-6,
    use_cache=True,
    vocab_size=VOCABULARY,
)
_ROPE = dict(rope_type="default", rope_theta=10000, partial_rotary_factor=0.5)
_IMAGE_ROPE = _ROPE | dict(mrope_interleaved=True, mrope_section=[1, 1, 0])
_EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=WIDTH
)
_VISION = dict(
    depth=1,
    hidden_act="gelu_pytorch_tanh",
    hidden_size=16,
    in_channels=3,
    intermediate_size=24,
    model_type="qwen3_5",
    num_heads=2,
    num_position_embeddings=16,
    out_hidden_size=HIDDEN,
    patch_size=4,
    spatial_merge_size=2,
    temporal_patch_size=2,
)
_WHOLE = dict(image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5": dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        text_config=_TEXT | dict(model_type="qwen3_5_text", intermediate_size=48, rope_parameters=_IMAGE_ROPE),
        vision_config=_VISION,
        tie_word_embeddings=True,
        **_WHOLE,
    ),
    "qwen3.5-moe": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"],
        model_type="qwen3_5_moe",
        text_config=_TEXT | dict(model_type="qwen3_5_moe_text", rope_parameters=_IMAGE_ROPE, **_EXPERTS),
        vision_config=_VISION | dict(model_type="qwen3_5_moe"),
        tie_word_embeddings=False,
        **_WHOLE,
    ),
    "qwen3-next": _TEXT
    | dict(
        architectures=["Qwen3NextForCausalLM"],
        model_type="qwen3_next",
        intermediate_size=48,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        tie_word_embeddings=False,
        rope_parameters=_ROPE,
        **_EXPERTS,
    ),
}


def save_published(folder: Path, case: str, seed: int = 1) -> dict[str, Tensor]:
    """Write the folder of a case with random weights in two shards; returns its tensors."""
    torch.manual_seed(seed)
    config = CONFIGS[case]
    tensors = {name: values.to(_dtype(name)) for name, values in sorted(_tensors(config).items())}
    folder.mkdir(parents=True)
    weight_map = {}
    names = list(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        # Qwen3.5's shards have such names, Qwen3-Next's those of transformers.
        stem = "model" if case == "qwen3-next" else "model.safetensors"
        file = f"{stem}-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    for name in ("preprocessor_config", "video_preprocessor_config") if "vision_config" in config else ():
        (folder / f"{name}.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}\n')
    return tensors


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) else torch.bfloat16


def _tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors by name: transformers' for the text model and the tower, and the head that it ignores."""
    import transformers

    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    model = getattr(transformers, config["architectures"][0])(settings)
    tensors = {name: torch.randn(values.shape) * 0.1 for name, values in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if config["model_type"] == "qwen3_next":
        tensors = _separate_experts(tensors)
    layer = {name.split(".layers.1.")[1]: values.shape for name, values in tensors.items() if ".layers.1." in name}
    for name, shape in layer.items():
        tensors[f"mtp.layers.0.{name}"] = torch.randn(shape)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.randn(HIDDEN)
    tensors["mtp.fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN)
    return tensors


def _separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Qwen3-Next's checkpoints hold every expert's matrices by themselves, whatever transformers keeps in memory."""
    separate = {}
    for name, values in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in values):
                prefix = name.removesuffix("gate_up_proj") + str(expert)
                separate |= {f"{prefix}.gate_proj.weight": gate.clone(), f"{prefix}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            separate |= {f"{prefix}{expert}.down_proj.weight": matrix.clone() for expert, matrix in enumerate(values)}
        else:
            separate[name] = values
    return separate
