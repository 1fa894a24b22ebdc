"""Runs of hybrid models: from and to Hugging Face folders, interrupted and continued, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import assert_equal_tensors, seed_all
from conversion_cases import save_huggingface, tensors_in
from hybrid_cases import NEMOTRON_EXPERTS, SIZES, hybrid_flags, hybrid_model
from lora_training_cases import convert
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.checks.hybrid import check_hybrid
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.huggingface.convert import ADAPTER_WEIGHTS
from resume_cases import final_tensors, rows_without_timing
from trainer_cases import VOCABULARY, make_rollouts, run

MAMBA = NEMOTRON_EXPERTS | dict(
    mixer_layer_freq=None, attention_output_gate=False, apply_layernorm_1p=False, rotary_percent=1.0,
    moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.0,
)  # fmt: skip


@pytest.fixture(params=[{}, MAMBA], ids=["delta", "mamba"])
def model_flags(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    return hybrid_flags(tmp_path / "shape", VOCABULARY, **request.param)


@pytest.fixture
def rollouts(tmp_path: Path) -> str:
    write_rollouts(tmp_path / "r.jsonl", make_rollouts(seed_all(31), 5, 3))
    return f"--rollouts {tmp_path}/r.jsonl --global-batch-size 6"


def test_a_continued_run_is_the_unbroken_one(rollouts: str, model_flags: str, tmp_path: Path) -> None:
    arguments = f"{rollouts} --bf16 --save-interval 1 --tree-segment-tokens 12"
    run(f"{arguments} --train-iters 2 --save {tmp_path}/whole", model_flags)
    run(f"{arguments} --train-iters 1 --save {tmp_path}/parts", model_flags)
    _, output = run(f"{arguments} --train-iters 2 --save {tmp_path}/parts", model_flags)
    assert "continuing" in output
    expected, resumed = final_tensors(tmp_path / "whole"), final_tensors(tmp_path / "parts")
    # Megatron's names: the sections of fused projections are stored apart.
    sections = ("self_attention.in_proj.weight.alpha", "self_attention.in_proj.weight.dt")
    assert any(name.endswith(sections) for name in expected)
    assert_equal_tensors(resumed, expected)
    assert rows_without_timing(tmp_path / "parts") == rows_without_timing(tmp_path / "whole")


def test_a_run_from_scratch_exports_a_folder_that_transformers_loads(
    rollouts: str, model_flags: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="loads the folder (extra 'test')")
    trainer, _ = run(f"{rollouts} --train-iters 1 --save-hf {tmp_path}/hf", model_flags)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    first, layer = loaded.model.layers[0], trainer.model.decoder.layers[0].self_attention
    assert torch.equal(
        (first.mixer if hasattr(first, "mixer") else first.linear_attn).conv1d.weight, layer.conv1d.weight
    )
    settings = settings_from_hf(tmp_path / "hf", {})
    if hasattr(first, "mixer"):
        assert (settings["hybrid_layer_pattern"], settings["position_embedding_type"]) == ("MEM*-E", "none")
        expert = trainer.model.decoder.layers[1].mlp.experts.local_experts[3].linear_fc1.weight
        assert torch.equal(loaded.model.layers[1].mixer.experts.up_proj[3], expert)
    else:
        assert (settings["rotary_percent"], settings["mixer_layer_freq"]) == (0.5, "[1,0,1]")


THREE_HEADS = replace(SIZES, linear_num_value_heads=3)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (dict(mixer=THREE_HEADS), {}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        (dict(mixer_layer_freq="[1,1]"), {}, "has 2 entries for --num-layers 3"),
        ({}, dict(tensor_model_parallel_size=4), "does not divide linear_num_key_heads 2"),
        (dict(transformer_impl="transformer_engine"), {}, "needs --transformer-impl local"),
        (dict(normalization="LayerNorm"), {}, "apply_layernorm_1p with --normalization LayerNorm"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(changes: dict, mesh: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_hybrid(hybrid_model(9, **changes), ParallelConfig(**mesh))


def test_sampling_in_this_process_and_training_agree(model_flags: str, tmp_path: Path) -> None:
    """Where training starts at the sampler's weights, importance ratios are 1."""
    method = "--rollout-method treepo --treepo-segment-length 3 --advantage-estimator treepo"
    sampled = "--task arithmetic --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 5"
    trainer, _ = run(f"{sampled} {method} --train-iters 1 --save {tmp_path}/run --old-logprobs rollout", model_flags)
    row = rows_without_timing(tmp_path / "run")[-1]
    assert row["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert trainer.engine.mesh.world_size == 1


@pytest.mark.parametrize("case", ["qwen3-next", "nemotron-h", "deepseek-v3"])
def test_adapters_resume_merge_and_export(case: str, rollouts: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="makes the folders (extra 'test')")
    save_huggingface(tmp_path / "hf", case, seed=len(case))
    adapted = f"{rollouts} --load-hf {tmp_path}/hf --lr 2e-2 --lora-rank 3 --lora-alpha 6 --save-interval 1"
    run(f"{adapted} --train-iters 2 --save {tmp_path}/run --save-hf {tmp_path}/merged", "")
    run(f"{adapted} --train-iters 1 --save {tmp_path}/parts", "")
    run(f"{adapted} --train-iters 2 --save {tmp_path}/parts", "")
    expected, resumed = final_tensors(tmp_path / "run"), final_tensors(tmp_path / "parts")
    stored = {"qwen3-next": "in_proj_adapter.lora_B.alpha", "nemotron-h": "in_proj_adapter.lora_B.dt"}
    adapter = stored.get(case, "linear_kv_down_proj_adapter.lora_B")
    assert any(name.endswith(f"self_attention.{adapter}") for name in expected)
    assert_equal_tensors(resumed, expected)
    first, merged = tensors_in(tmp_path / "hf"), tensors_in(tmp_path / "merged")
    from_files = tensors_in(convert(tmp_path / "run", tmp_path / "hf", tmp_path / "from-files"))
    peft = load_file(convert(tmp_path / "run", tmp_path / "hf", tmp_path / "peft", "--adapter-only") / ADAPTER_WEIGHTS)
    adapted = ("in_proj.weight", "in_proj_qkvz.weight", "out_proj.weight", "mqa.weight", "kv_b_proj.weight")
    projections = [name for name in first if name.endswith(adapted)]
    assert projections
    for name in projections:
        matrices = (peft[f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight"] for part in "BA")
        second, down = (matrix.double() for matrix in matrices)
        assert (second != 0).any()
        assert torch.allclose(first[name].double() + 2 * second @ down, merged[name].double(), rtol=0, atol=2e-6), name
    for name, values in merged.items():
        assert torch.allclose(from_files[name], values, rtol=0, atol=2e-6), name
