"""Folders as published: the text model is trained, and what lies beside it is exported byte for byte."""

import filecmp
import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conversion_cases import save_huggingface, tensors_in, to_huggingface, to_megatron
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.huggingface.config.config import model_settings
from megatron_dta.training.huggingface.files import carried_text
from megatron_dta.training.huggingface.save import hf_weights
from megatron_dta.wiring.setup import build_trainer
from tool_runs import run_tool
from verify_checkpoint_cases import verify

pytest.importorskip("transformers", reason="the other side needs transformers (extra 'test')")


HIDDEN, VOCABULARY, WIDTH = 32, 259, 16
_TEXT: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=257,
    full_attention_interval=2, head_dim=8, hidden_act="silu", hidden_size=HIDDEN, initializer_range=0.02,
    layer_types=["linear_attention", "full_attention"], linear_conv_kernel_dim=4, linear_key_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=8, mamba_ssm_dtype="float32",
    max_position_embeddings=512, mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, num_attention_heads=4,
    num_hidden_layers=2, num_key_value_heads=2, partial_rotary_factor=0.5, rms_norm_eps=1e-6, use_cache=True,
    vocab_size=VOCABULARY,
)  # fmt: skip
_ROPE = dict(rope_type="default", rope_theta=10000, partial_rotary_factor=0.5)
_IMAGE_ROPE = _ROPE | dict(mrope_interleaved=True, mrope_section=[1, 1, 0])
_EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=WIDTH
)
_LATENT: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, eos_token_id=257, first_k_dense_replace=1, hidden_act="silu",
    hidden_size=HIDDEN, initializer_range=0.02, intermediate_size=48, kv_lora_rank=16, max_position_embeddings=512,
    moe_intermediate_size=WIDTH, n_routed_experts=8, n_shared_experts=2, norm_topk_prob=True, num_attention_heads=4,
    num_experts_per_tok=4, num_hidden_layers=2, num_key_value_heads=4, num_nextn_predict_layers=1, q_lora_rank=12,
    qk_nope_head_dim=8, qk_rope_head_dim=4, rms_norm_eps=1e-5, rope_theta=10000, routed_scaling_factor=2.5,
    tie_word_embeddings=False, topk_method="noaux_tc", torch_dtype="bfloat16", v_head_dim=8, vocab_size=VOCABULARY,
)  # fmt: skip
# Nemotron 3's file has both names of some sizes.
_MAMBA: dict[str, Any] = dict(
    architectures=["NemotronHForCausalLM"], auto_map={"AutoModel": "modeling_nemotron_h.NemotronHModel"},
    attention_bias=False, attention_dropout=0.0, conv_kernel=4, eos_token_id=2, expand=2, head_dim=8,
    hidden_dropout=0.0, hidden_size=HIDDEN, hybrid_override_pattern="MEM*", intermediate_size=48,
    layer_norm_epsilon=1e-5, mamba_head_dim=8, mamba_hidden_act="silu", mamba_num_heads=4, mamba_proj_bias=False,
    max_position_embeddings=512, mlp_bias=False, mlp_hidden_act="relu2", model_type="nemotron_h",
    moe_intermediate_size=WIDTH, moe_shared_expert_intermediate_size=24, n_group=1, n_groups=2, n_routed_experts=4,
    n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True, num_attention_heads=4, num_experts_per_tok=2,
    num_hidden_layers=4, num_key_value_heads=2, partial_rotary_factor=1.0, residual_in_fp32=False, rope_theta=10000,
    routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=16, tie_word_embeddings=False,
    time_step_floor=0.0001, time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001, topk_group=1,
    torch_dtype="bfloat16", use_bias=False, use_cache=True, use_conv_bias=True, vocab_size=VOCABULARY,
)  # fmt: skip
_YARN = dict(type="yarn", factor=4, beta_fast=32, beta_slow=1, original_max_position_embeddings=128)
_VISION = dict(
    depth=1, hidden_act="gelu_pytorch_tanh", hidden_size=16, in_channels=3, intermediate_size=24, model_type="qwen3_5",
    num_heads=2, num_position_embeddings=16, out_hidden_size=HIDDEN, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2,
)  # fmt: skip
_WHOLE = dict(image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253)
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3.5": dict(
        architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", vision_config=_VISION,
        text_config=_TEXT | dict(model_type="qwen3_5_text", intermediate_size=48, rope_parameters=_IMAGE_ROPE),
        tie_word_embeddings=True, **_WHOLE,
    ),
    "qwen3.5-moe": dict(
        architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe",
        text_config=_TEXT | dict(model_type="qwen3_5_moe_text", rope_parameters=_IMAGE_ROPE, **_EXPERTS),
        vision_config=_VISION | dict(model_type="qwen3_5_moe"), tie_word_embeddings=False, **_WHOLE,
    ),
    "qwen3-next": _TEXT | dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", intermediate_size=48, decoder_sparse_step=1,
        mlp_only_layers=[], norm_topk_prob=True, tie_word_embeddings=False, rope_parameters=_ROPE, **_EXPERTS,
    ),
    "deepseek-v3": _LATENT | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", moe_layer_freq=1, n_group=4, topk_group=2,
        auto_map={"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, scoring_func="sigmoid",
        rope_scaling=_YARN | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
    "nemotron-3": _MAMBA,
    "glm-4.7-flash": _LATENT
    | dict(architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", rope_scaling=None)
    | dict(n_group=1, topk_group=1, partial_rotary_factor=1.0),
}  # fmt: skip


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
        stem = "model.safetensors" if "text_config" in config else "model"
        file = f"{stem}-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(values.nbytes for values in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=4) + "\n")
    for name in ("preprocessor_config", "video_preprocessor_config") if "vision_config" in config else ():
        (folder / f"{name}.json").write_text('{"image_processor_type": "Qwen2VLImageProcessorFast"}\n')
    if "auto_map" in config:
        (folder / "modeling_deepseek.py").write_text("raise RuntimeError('nobody runs this')\n")
    return tensors


def _dtype(name: str) -> torch.dtype:
    wide = ("linear_attn.A_log", "linear_attn.norm.weight", "e_score_correction_bias")
    return torch.float32 if name.endswith(wide) else torch.bfloat16


def _tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors by name: transformers' for the text model and the tower, and the head that it ignores."""
    import transformers

    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    model = getattr(transformers, config["architectures"][0])(settings)
    tensors = {name: torch.randn(values.shape) * 0.1 for name, values in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if config["model_type"] not in ("qwen3_5", "qwen3_5_moe"):
        tensors = _separate_experts(tensors)
    if config["model_type"] == "nemotron_h":
        # Steps below ``time_step_min``, which bounds them in transformers only.
        tensors |= {name: values - 8 for name, values in tensors.items() if name.endswith("dt_bias")}
        tensors = {name.replace("model.", "backbone.", 1): values for name, values in tensors.items()}
    if "kv_lora_rank" in config:
        head = {name.replace(".layers.1.", ".layers.2."): torch.randn_like(values) for name, values in tensors.items()}
        tensors |= {name: values for name, values in head.items() if ".layers.2." in name}
        tensors |= {f"model.layers.2.{name}.weight": torch.randn(HIDDEN) for name in ("enorm", "hnorm")}
        return tensors | {"model.layers.2.eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN)}
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
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            prefix, _, part = name.rpartition(".")
            separate |= {f"{prefix}.{expert}.{part}.weight": matrix.clone() for expert, matrix in enumerate(values)}
        else:
            separate[name] = values
    return separate


def train(folder: Path, steps: int, source: Path, *flags: str) -> tuple[object, str]:
    """The trainer after a run of ``steps`` in ``folder``, and what it printed."""
    rollouts = folder / "rollouts.jsonl"
    if not rollouts.exists():
        write_rollouts(rollouts, [Rollout(np.arange(8, dtype=np.int32), np.arange(8) > 0)])
    command = f"--load-hf {source} --rollouts {rollouts} --objective sft --global-batch-size 1 --lr 1e-2"
    printed = StringIO()
    arguments = [*command.split(), "--train-iters", str(steps), "--save", str(folder / "run"), *flags]
    trainer = build_trainer(parse_arguments(arguments), Console(file=printed, width=400))
    trainer.run()
    return trainer, printed.getvalue()


def assert_carried(folder: Path, source: Path) -> None:
    """The same tensors in the same files, and those beside the text model unchanged."""
    expected, tensors = tensors_in(source), tensors_in(folder)
    assert tensors.keys() == expected.keys()
    assert (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        == (json.loads((source / "model.safetensors.index.json").read_text())["weight_map"])
    )
    beside = [name for name in expected if name.startswith(("mtp.", "model.visual.", "model.layers.2."))]
    assert len(beside) >= 15
    for name in beside:
        assert tensors[name].dtype is expected[name].dtype
        assert torch.equal(tensors[name], expected[name]), name
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in source.iterdir())


@pytest.mark.parametrize("case", CONFIGS)
def test_training_and_both_converters(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Started, two of them resumed, exported; the converters bring every byte back; transformers computes the same."""
    source, run = tmp_path / "hf", tmp_path / "run"
    expected = save_published(source, case)
    beside = carried_text(expected)
    if case in ("qwen3.5", "deepseek-v3"):
        _, printed = train(tmp_path, 1, source)
        assert f"{beside}; exports hold them unchanged" in printed
    trainer, printed = train(tmp_path, 2, source, "--save-hf", str(tmp_path / "out"))
    assert f"{beside}; exports hold them unchanged" in printed
    assert_carried(tmp_path / "out", source)
    # Rollout servers get the names that they know from the folder, and every expert by itself.
    sent = hf_weights(trainer.config, trainer.model).shapes()
    if case == "nemotron-3":
        assert sent.keys() == {name for name in expected if not name.startswith("mtp.")}
    else:
        prefix = "model.language_model." if "text_config" in CONFIGS[case] else "model."
        assert f"{prefix}embed_tokens.weight" in sent
        assert (f"{prefix}layers.0.mlp.experts.3.gate_proj.weight" in sent) == (
            "num_experts" in str(CONFIGS[case]) and "kv_lora_rank" not in CONFIGS[case]
        )

    run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/megatron")
    assert f"not in it: {beside}; " in capsys.readouterr().out.replace("\n", " ")
    for checkpoint, target in ((tmp_path / "megatron", "back"), (run, "trained")):
        flags = f"--load {checkpoint} --hf-checkpoint {source} --save-hf {tmp_path}/{target}"
        run_tool(monkeypatch, "convert_megatron_to_hf", flags)
        assert_carried(tmp_path / target, source)
    names = [path.name for path in source.iterdir()]
    assert sorted(filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)[0]) == sorted(names)
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "trained", names, shallow=False)[1:] == ([], [])
    status, summary, out = verify(monkeypatch, capsys, source, tmp_path / "megatron", "--seq-length", "20")
    assert status == 0, out
    assert f"not compared: {beside}" in out
    assert summary["tokens"] == 80


def test_a_name_that_transformers_does_not_know_is_compared_all_the_same(tmp_path: Path, monkeypatch, capsys) -> None:
    """Kimi K2: the architecture of DeepSeek V3 under a name of its own."""
    source = tmp_path / "hf"
    save_published(source, "deepseek-v3")
    kimi = CONFIGS["deepseek-v3"] | dict(model_type="kimi_k2", n_group=1, topk_group=1)
    del kimi["auto_map"]
    kimi["rope_scaling"] = kimi["rope_scaling"] | dict(beta_fast=1.0, beta_slow=1.0)
    (source / "config.json").write_text(json.dumps(kimi))
    to_megatron(source, tmp_path / "megatron")
    status, _, out = verify(monkeypatch, capsys, source, tmp_path / "megatron", "--seq-length", "20")
    assert status == 0, out


def test_an_export_names_the_file_that_it_lacks(tmp_path: Path) -> None:
    """Before training."""
    source = tmp_path / "hf"
    save_published(source, "qwen3.5")
    train(tmp_path, 1, source)
    missing = source / "model.safetensors-00002-of-00002.safetensors"
    missing.unlink()
    with pytest.raises(InputError, match=f"{missing.name}: missing; .* exported unchanged: .* model.visual"):
        train(tmp_path, 2, source, "--save-hf", str(tmp_path / "out"))


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_other_beginnings_of_names(prefix: str, tmp_path: Path) -> None:
    """As transformers names the tensors of a model without a head, beside a vision tower, and did in old versions."""
    source = tmp_path / "hf"
    save_huggingface(source, "qwen3", 3, shard="1GB")
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"
    tensors = {
        head if name == "lm_head.weight" else prefix + name.removeprefix("model."): values
        for name, values in tensors_in(source).items()
    }
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(4.0)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    back = to_huggingface(to_megatron(source, tmp_path / "megatron"), source, tmp_path / "back")
    assert filecmp.cmp(source / "model.safetensors", back / "model.safetensors", shallow=False)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    save_huggingface(source, "qwen3", 3, shard="1GB")
    tensors = tensors_in(source)
    for suffix in ("weight_scale_inv", "qweight", "weight_packed"):  # FP8, GPTQ, compressed-tensors
        name = f"model.layers.0.mlp.up_proj.{suffix}"
        save_file({**tensors, name: torch.ones(1)}, source / "model.safetensors")
        with pytest.raises(InputError, match=rf"holds quantized weights \({name}\), which cannot be trained"):
            to_megatron(source, tmp_path / "megatron")
    eight_bits = {name: values.to(torch.float8_e4m3fn) for name, values in tensors.items()}
    save_file(eight_bits, source / "model.safetensors")
    with pytest.raises(InputError, match=r"is of type F8_E4M3; weights must be one of .* \(not quantized\)"):
        to_megatron(source, tmp_path / "megatron")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights are not supported"),
    ],
)
def test_a_nested_configuration_is_checked(changes: dict, message: str, tmp_path: Path) -> None:
    config = CONFIGS["qwen3.5"]
    with pytest.raises(InputError, match=message):
        model_settings({**config, "text_config": {**config["text_config"], **changes}})
    # What holds for the whole model is read beside the text model's configuration.
    assert model_settings(config)["untie_embeddings_and_output_weights"] is False
    with pytest.raises(InputError, match="quantized weights are not supported"):
        model_settings({**config, "quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(InputError, match="has a vision tower, beside which only the text models of"):
        model_settings({**config, "architectures": ["Qwen3VLForConditionalGeneration"]})
