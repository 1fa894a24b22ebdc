"""config.json of Nemotron-H and Nemotron 3: the named shape, what is written, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_cases import NEMOTRON, NEMOTRON_EXPERTS
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.core.config.checks.hybrid import check_hybrid
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.families.mamba2 import sizes as mamba2
from megatron_dta.families.named_shapes import SHAPES
from megatron_dta.training.huggingface.config.config import model_settings, settings_from_hf
from megatron_dta.training.huggingface.config.config_output import config_from_settings

NANO: dict[str, Any] = dict(
    architectures=["NemotronHForCausalLM"], auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    model_type="nemotron_h", head_dim=128, hidden_size=2688, intermediate_size=1856, layer_norm_epsilon=1e-5,
    hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", mamba_num_heads=64,
    mamba_head_dim=64, mlp_hidden_act="relu2", moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
    n_groups=8, n_routed_experts=128, num_attention_heads=32, num_experts_per_tok=6, num_hidden_layers=52,
    num_key_value_heads=2, routed_scaling_factor=2.5, ssm_state_size=128, vocab_size=131072,
    time_step_limit=[0.0, float("inf")],
)  # fmt: skip
TINY = dict(hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=8, vocab_size=19)


def test_the_named_shape_is_that_of_the_published_file():
    assert DecoderShape.of(ModelConfig(**model_settings(NANO))) == SHAPES["nemotron-3-nano-30b-a3b"]
    assert round(SHAPES["nemotron-3-nano-30b-a3b"].num_parameters / 1e9, 1) == 31.6


@pytest.mark.parametrize("settings", [NEMOTRON, NEMOTRON_EXPERTS], ids=["dense", "experts"])
def test_settings_become_a_config_that_says_the_same(settings):
    more = dict(moe_router_enable_expert_bias=True) if "num_experts" in settings else {}
    model = ModelConfig(**TINY, **settings | more)
    assert model_settings(config_from_settings(model))["hybrid_layer_pattern"] == settings["hybrid_layer_pattern"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(quantization_config={"quant_method": "modelopt"}), "quantized weights are not supported"),
        (dict(hybrid_override_pattern="MX*"), "supported are M, *, - and E"),
        (dict(hybrid_override_pattern="*-"), "the layers *- are not supported: both M and *"),
        (dict(hybrid_override_pattern="M-"), "the layers M- are not supported: both M and *"),
        (dict(layers_block_type=["mamba", "lstm"]), "supported are M, *, - and E"),
        (dict(time_step_limit=[0.0, 0.1]), "supported is [0, Infinity]"),
        (dict(moe_latent_size=64), "moe_latent_size 64 is not supported"),
        (dict(use_bias=True), "use_bias true is not supported"),
        (dict(n_group=4, topk_group=2), "topk_group 2 is not supported with num_experts_per_tok 6, but 3"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings true is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=re.escape(message)):
        model_settings(NANO | changes)


@pytest.mark.parametrize(
    ("flag", "said"),
    [(dict(num_experts=16), "n_routed_experts 128"), (dict(norm_epsilon=1e-6), "layer_norm_epsilon 1e-05")],
)
def test_a_flag_that_contradicts_names_the_key(flag: dict, said: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    with pytest.raises(InputError, match=f"contradicts .*: {said}; leave the flag out"):
        settings_from_hf(tmp_path, flag)


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        (dict(hybrid_layer_pattern="M-M*"), {}, "give one of M, *, - and E for each of --num-layers 5"),
        (dict(hybrid_layer_pattern="M-M-M"), {}, "no layer has attention"),
        (dict(hybrid_layer_pattern="MEM*M"), {}, "layers E need sizes"),
        (dict(swiglu=True), {}, "excludes mixer_layer_freq"),
        (dict(swiglu=True, hybrid_layer_pattern=None, mixer_layer_freq="[1,0]*2+[1]"), {}, "excludes --swiglu; leave"),
        (dict(mixer=mamba2.Sizes(mamba_conv_kernel=0)), {}, "mamba2: mamba_conv_kernel is 0; it must be at least 1"),
        ({}, dict(tensor_model_parallel_size=8), "does not divide mamba_num_groups 4"),
    ],
)
def test_patterns_and_meshes_that_cannot_work(changes, mesh, message):
    with pytest.raises(InputError, match=re.escape(message)):
        check_hybrid(ModelConfig(**TINY, **NEMOTRON | changes), ParallelConfig(**mesh))
