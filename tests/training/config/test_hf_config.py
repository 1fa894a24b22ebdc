"""config.json -> settings: published models, both layouts of transformers, contradictions, refusals, broken files.

The configurations are those of the published checkpoints, without the keys that say nothing of the architecture.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.huggingface.config.config import model_settings, read_hf_config, settings_from_hf

FIXTURES = Path(__file__).parents[2] / "helpers" / "hf_configs"


ROPE_KEYS = ("rope_theta", "rope_scaling")
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}
RUN = "--rollouts a.jsonl --global-batch-size 8"


def published(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def folder_of(path: Path, config: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def in_layout_5(config: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it."""
    rope = {"rope_type": "default", **(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta", 1e4)}
    return {**{key: value for key, value in config.items() if key not in ROPE_KEYS}, "rope_parameters": rope}


@pytest.mark.parametrize("name", sorted(path.stem for path in FIXTURES.glob("*.json")))
def test_what_transformers_reads_is_what_is_read_here(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = published(name)
    generator = seed_all(len(name))
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    optional = [key for key in config if key not in ("architectures", "model_type", "num_experts", *needed)]
    for _ in range(15):
        dropped = {str(key) for key in generator.choice(optional, size=generator.integers(0, 5))}
        print("without", sorted(dropped))
        partial = {key: value for key, value in config.items() if key not in dropped}
        if dropped & {"moe_intermediate_size", "num_experts_per_tok", "num_local_experts"}:
            continue  # what a model with experts must say
        if "num_key_value_heads" in dropped and config["num_attention_heads"] % 32:
            continue  # the family's default does not fit, which transformers does not notice
        settings = model_settings(partial, max_position_embeddings=4096)
        theirs = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(partial)))
        rope = getattr(theirs, "rope_parameters", None) or {}
        head = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
        if "rope_theta" in partial:
            assert model_settings(in_layout_5(partial), max_position_embeddings=4096) == settings
        assert settings["num_layers"] == theirs.num_hidden_layers
        for ours in ("hidden_size", "num_attention_heads", "vocab_size"):
            assert settings[ours] == getattr(theirs, ours)
        assert settings["ffn_hidden_size"] == theirs.intermediate_size
        assert settings["kv_channels"] == head
        assert settings["num_query_groups"] == theirs.num_key_value_heads
        assert settings["norm_epsilon"] == theirs.rms_norm_eps
        assert settings["rotary_base"] == rope.get("rope_theta", getattr(theirs, "rope_theta", None))
        assert settings["untie_embeddings_and_output_weights"] is not theirs.tie_word_embeddings
        if "num_experts_per_tok" in partial:
            normalized = getattr(theirs, "norm_topk_prob", True)  # Mixtral's always is
            assert settings["moe_router_pre_softmax"] is not normalized


def test_sliding_window_is_no_limit_for_sequences_that_fit(tmp_path: Path) -> None:
    config = published("mistral-7b-v0.1")
    assert model_settings(config, max_position_embeddings=4096)["max_position_embeddings"] == 4096
    with pytest.raises(InputError, match=r"sliding_window 4096 .* give --max-position-embeddings 4096 or less"):
        model_settings(config)
    folder = folder_of(tmp_path / "model", config)
    parsed = parse_arguments(f"--hf-checkpoint {folder} {RUN} --max-position-embeddings 4000".split())
    assert parsed.model.max_position_embeddings == 4000
    with pytest.raises(InputError, match="sliding_window"):
        parse_arguments(f"--hf-checkpoint {folder} {RUN} --max-position-embeddings 4097".split())
    qwen = published("qwen2.5-7b") | {"use_sliding_window": True, "sliding_window": 1000}
    assert model_settings(qwen)["num_layers"] == 28  # no layer slides below max_window_layers
    for change in ({"max_window_layers": 27}, {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}):
        with pytest.raises(InputError, match="sliding_window 1000"):
            model_settings(qwen | change)
    assert model_settings(qwen | {"layer_types": ["full_attention"] * 28, "max_window_layers": 2})


def test_layers_with_experts() -> None:
    config = published("qwen3-30b-a3b") | {"num_hidden_layers": 6}
    assert model_settings(config | {"decoder_sparse_step": 2})["moe_layer_freq"] == [0, 1, 0, 1, 0, 1]
    assert model_settings(config | {"mlp_only_layers": [0, 5]})["moe_layer_freq"] == [0, 1, 1, 1, 1, 0]
    assert model_settings(config | {"norm_topk_prob": False})["moe_router_pre_softmax"] is True
    with pytest.raises(InputError, match="no layer has experts"):
        model_settings(config | {"decoder_sparse_step": 7})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-layers 12", "--num-layers 12 contradicts .*config.json: num_hidden_layers 2; leave the flag out"),
        ("--num-query-groups 4", "--num-query-groups 4 contradicts .*: num_key_value_heads 2"),
        ("--norm-epsilon 1e-5", "--norm-epsilon 1e-05 contradicts .*: no rms_norm_eps, which means 1e-06"),
        ("--qk-layernorm", "--qk-layernorm contradicts .*: the architecture is LlamaForCausalLM"),
    ],
)
def test_flags_that_contradict_are_refused(flags: str, message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", SMALL)
    with pytest.raises(InputError, match=message) as caught:
        parse_arguments(f"--hf-checkpoint {folder} {RUN} {flags}".split())
    assert "\n" not in str(caught.value)


def test_flags_that_agree_or_are_free_are_accepted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", SMALL)
    flags = "--num-layers 2 --num-query-groups 2 --swiglu --rotary-base 10000 --vocab-size 100"
    free = "--max-position-embeddings 700 --init-method-std 0.5 --make-vocab-size-divisible-by 64 --bf16"
    model = parse_arguments(f"--hf-checkpoint {folder} {RUN} {flags} {free}".split()).model
    assert (model.max_position_embeddings, model.init_method_std, model.padded_vocab_size()) == (700, 0.5, 128)
    with pytest.raises(InputError, match="--num-layers, --hidden-size, --num-attention-heads; give them, or --hf"):
        parse_arguments(RUN.split())


def test_prompts_get_the_tokenizer_of_the_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", SMALL)
    prompts = f"--hf-checkpoint {folder} --prompt-data p.jsonl --reward-function exact_match"
    with pytest.raises(InputError, match="--prompt-data needs --tokenizer-type"):
        parse_arguments(prompts.split())
    (folder / "tokenizer.model").write_text("")
    assert parse_arguments(prompts.split()).sampling.tokenizer_type == "SentencePieceTokenizer"
    (folder / "tokenizer.json").write_text("{}")
    sampling = parse_arguments(prompts.split()).sampling
    assert (sampling.tokenizer_type, sampling.tokenizer_model) == ("HuggingFaceTokenizer", f"{folder}/tokenizer.json")
    given = parse_arguments(f"{prompts} --tokenizer-type HuggingFaceTokenizer --tokenizer-model other".split()).sampling
    assert given.tokenizer_model == "other"
    sampling = parse_arguments(f"{prompts} --tokenizer-type NullTokenizer --eos-id 1".split()).sampling
    assert sampling.tokenizer_model is None


REFUSED = [
    ({"architectures": ["GPT2LMHeadModel"]}, "the architecture GPT2LMHeadModel is not supported"),
    ({"architectures": ["Qwen3ForCausalLM"]}, "model_type llama does not belong"),
    ({"architectures": "LlamaForCausalLM"}, "it must be a list of one name"),
    ({"auto_map": {"AutoModel": "x"}}, "auto_map"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ({"attention_bias": True}, "attention_bias true is not supported for LlamaForCausalLM"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ({"head_dim": 15}, "head size 15 is odd"),
    ({"num_attention_heads": 5}, "num_attention_heads 5 is not divisible by num_key_value_heads 2"),
    ({"hidden_size": None}, "hidden_size is null"),
    ({"vocab_size": 32e3}, "vocab_size is 32000.0; it must be a whole number"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is .* must be true or false"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic is not supported"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2}}, "rope_type linear and type yarn differ"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "mrope_section": [1]}}, "mrope_section is not supported"),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor 4 must be below high_freq_factor 4",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rope for each kind of layer"),
    ({"rope_parameters": {"rope_theta": 2e4}, "rope_theta": 1e4}, "rope_theta is 10000 outside and 20000 inside"),
    ({"rope_parameters": {"rope_theta": 2e4}, "rope_scaling": {"type": "linear"}}, "differ; keep the one that holds"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2}, "original_max_position_embeddings": 99},
        "original_max_position_embeddings differs",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        model_settings(SMALL | change, origin="m/config.json")
    assert str(caught.value).startswith("m/config.json: ") or "m/config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_are_not_supported_are_refused() -> None:
    config = published("mixtral-8x7b-v0.1")
    for change, message in (
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok 1 is not supported"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        ({"num_local_experts": None}, "num_local_experts is null"),
    ):
        with pytest.raises(InputError, match=message):
            model_settings(config | change)


def test_broken_files(tmp_path: Path) -> None:
    for text, message in (("{", "not JSON"), ("[1]", "holds a list"), ("[" * 99999, "JSON")):
        with pytest.raises(InputError, match=message) as caught:
            read_hf_config(folder_of(tmp_path / "model", text))
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such folder"):
        settings_from_hf(tmp_path / "none", {})
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(InputError, match="no such file; give"):
        settings_from_hf(tmp_path / "model", {})
