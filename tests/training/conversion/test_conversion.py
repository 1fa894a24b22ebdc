"""Every architecture to Megatron and back: same logits and gradients, then the same bytes; end tokens of exports."""

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conversion_cases import (
    CASES,
    architecture_in,
    dense_config,
    save_huggingface,
    shape_of,
    stock_model,
    tensors_in,
    to_huggingface,
    to_megatron,
)
from megatron_dta.core.common.errors import InputError
from megatron_dta.training.checkpoint.files import find_checkpoint
from megatron_dta.training.checkpoint.save_load import load_weights
from megatron_dta.training.huggingface import convert
from megatron_dta.training.huggingface import files as safetensors_files
from megatron_dta.training.huggingface.config.end_token import name_end_token
from megatron_dta.training.huggingface.mappings import parameters_of
from megatron_dta.training.huggingface.weights import HfWeights


@pytest.fixture(scope="module", params=CASES)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Hugging Face's folder ``hf`` of a case and its conversion ``megatron``."""
    folder = tmp_path_factory.mktemp(request.param)
    save_huggingface(folder / "hf", request.param, seed=len(request.param))
    to_megatron(folder / "hf", folder / "megatron")
    return request.param, folder


def logits_and_gradients(module: torch.nn.Module, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    module.zero_grad()
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    return logits.detach()


def test_logits_and_gradients_are_hugging_faces(
    converted: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers
    from megatron.core.transformer.moe import moe_utils

    # Megatron's router asks for it without Transformer Engine too, where the name is missing.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)

    _, folder = converted
    source = folder / "hf"
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, 37, (1, 23), generator=torch.Generator().manual_seed(3))
    expected = logits_and_gradients(reference, reference(tokens, use_cache=False).logits, tokens)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    # Saved like weights, gradients have the names that files have, in every version of transformers.
    reference.save_pretrained(tmp_path)

    model = stock_model(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    load_weights(find_checkpoint(folder / "megatron"), dense_config(source), model)
    hidden_from = torch.ones(1, 1, 23, 23, dtype=torch.bool).triu(1)
    computed = logits_and_gradients(model, model(tokens, torch.arange(23)[None], hidden_from), tokens)
    assert (computed - expected).abs().max() < 1e-5 * expected.abs().max()
    gradients = tensors_in(tmp_path)
    by_name = {parameter.name: parameter for parameter in parameters_of(architecture_in(source), shape_of(source))}
    compared = set()
    for name, parameter in model.named_parameters():
        for tensor, values in by_name[name].split(parameter.grad).items():
            scale = gradients[tensor].abs().max()
            assert scale > 0 or ".experts." in tensor, tensor
            assert (values - gradients[tensor]).abs().max() <= 1e-5 * max(scale, 1e-2), tensor
            compared.add(tensor)
    assert compared == gradients.keys()


def test_back_byte_for_byte(converted: tuple[str, Path], tmp_path: Path) -> None:
    """All files: weights, index, configuration, tokenizer."""
    _, folder = converted
    source, back = folder / "hf", to_huggingface(folder / "megatron" / "release", folder / "hf", tmp_path / "back")
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in back.iterdir()) == names
    assert len([name for name in names if name.endswith(".safetensors")]) > 1
    assert filecmp.cmpfiles(source, back, names, shallow=False)[0] == names


def test_the_live_model_has_the_files_tensors(converted: tuple[str, Path]) -> None:
    """Loaded without a checkpoint in between; whole and as this rank's shards."""
    _, folder = converted
    model = stock_model(folder / "hf")
    weights = HfWeights([model], architecture_in(folder / "hf"), shape_of(folder / "hf"))
    weights.load(folder / "hf")
    expected = tensors_in(folder / "hf")
    tensors = dict(weights.iterate())
    assert tensors.keys() == expected.keys() == weights.shapes().keys()
    shards = {shard.name: shard for shard in weights.iterate_shards()}
    for name, values in expected.items():
        assert torch.equal(tensors[name], values), name
        assert torch.equal(shards[name].values, values), name
        assert set(shards[name].offsets) == {0}
        assert (tuple(values.shape), values.dtype) == weights.shapes()[name]


def test_another_dtype_and_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows change nothing; config.json names the dtype."""
    source = tmp_path / "hf"
    save_huggingface(source, "qwen3-moe", 8, torch.bfloat16)
    monkeypatch.setattr(convert, "PIECE_BYTES", 700)
    monkeypatch.setattr(safetensors_files, "_BUFFER_BYTES", 300)
    checkpoint = to_megatron(source, tmp_path / "megatron")
    # What is before and after the layers, two layers, and extra states.
    assert len(list(checkpoint.glob("*.distcp"))) == 5
    same, wide = (to_huggingface(checkpoint, source, tmp_path / str(dtype), dtype) for dtype in (None, torch.float32))
    names = [path.name for path in source.iterdir()]
    assert sorted(filecmp.cmpfiles(source, same, names, shallow=False)[0]) == sorted(names)
    expected, widened = tensors_in(source), tensors_in(wide)
    assert expected.keys() == widened.keys()
    assert all(torch.equal(widened[name], values.float()) for name, values in expected.items())
    assert '"float32"' in (wide / "config.json").read_text()


def test_layers_of_several_dtypes_are_stored_in_the_widest(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    save_huggingface(source, "qwen3", 8, torch.bfloat16, shard="1GB")
    tensors = tensors_in(source)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].double() / 3
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    restored = tensors_in(to_huggingface(to_megatron(source, tmp_path / "megatron"), source, tmp_path / "back"))
    assert all(torch.equal(restored[name].double(), values.double()) for name, values in tensors.items())
    assert restored["model.norm.weight"].dtype is torch.bfloat16


def test_a_checkpoint_of_training_comes_back(tmp_path: Path) -> None:
    """Written by this Megatron-Core, with settings and an optimizer's state: refused for another model."""
    from megatron_dta.core.model.build import build_model
    from megatron_dta.core.model.parallel.mesh import initialize_parallel
    from megatron_dta.training.checkpoint.save_load import save_checkpoint
    from megatron_dta.training.config import OptimizationConfig, TrainConfig
    from megatron_dta.training.optimizer.build import TrainingOptimizer

    source = tmp_path / "hf"
    save_huggingface(source, "qwen3", 9)
    config = dense_config(source)
    model = build_model(config, initialize_parallel(0))
    HfWeights([model], "Qwen3ForCausalLM", shape_of(source)).load(source)
    optimizer = TrainingOptimizer(model, OptimizationConfig(train_iters=1, lr=1e-3))
    checkpoint = save_checkpoint(tmp_path / "run", TrainConfig(model=config), model, optimizer, 7, {"note": [1, 2]})
    back = to_huggingface(checkpoint, source, tmp_path / "back")
    assert all(torch.equal(tensors_in(back)[name], values) for name, values in tensors_in(source).items())
    save_huggingface(tmp_path / "other", "qwen2", 9)
    with pytest.raises(InputError, match="is of another model: "):
        to_huggingface(checkpoint, tmp_path / "other", tmp_path / "again")


def test_a_tied_output_weight_may_be_repeated(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    save_huggingface(source, "qwen2-tied", 7, shard="1GB")
    tensors = tensors_in(source)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "megatron")
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        to_megatron(source, tmp_path / "again")


ADDED = {"added_tokens": [{"id": 6, "content": "<s>"}, {"id": 7, "content": "<|im_end|>"}]}


def write(folder: Path, **files: Any) -> None:
    for name, content in ({"tokenizer": ADDED} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_another_token_takes_the_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": 6, "hidden_size": 8},
        generation_config={"eos_token_id": 6, "temperature": 0.5},
        tokenizer_config={"eos_token": {"content": "<s>", "lstrip": False}, "chat_template": "é"},
        special_tokens_map={"eos_token": "<s>"},
    )
    name_end_token(tmp_path, 7)
    assert read(tmp_path, "config") == {"eos_token_id": 7, "hidden_size": 8}
    # generate() also stops at what it stopped at before.
    assert read(tmp_path, "generation_config") == {"eos_token_id": [7, 6], "temperature": 0.5}
    assert read(tmp_path, "tokenizer_config")["eos_token"] == {"content": "<|im_end|>", "lstrip": False}
    assert "é" in (tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")
    assert read(tmp_path, "special_tokens_map") == {"eos_token": "<|im_end|>"}


def test_files_that_name_it_keep_every_byte(tmp_path: Path) -> None:
    files = {
        "config": {"eos_token_id": [6, 7]},
        "generation_config": {"eos_token_id": [6, 7]},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
    }
    write(tmp_path, **files)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    name_end_token(tmp_path, 7)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {}}, {"text_config": {"eos_token_id": 7}}),
        (
            {"eos_token_id": [6], "text_config": {"eos_token_id": 6}},
            {"eos_token_id": 7, "text_config": {"eos_token_id": 7}},
        ),
        ({}, {"eos_token_id": 7}),
    ],
)
def test_configurations(config: dict, expected: dict, tmp_path: Path) -> None:
    write(tmp_path, config=config)
    name_end_token(tmp_path, 7)
    assert read(tmp_path, "config") == expected
    assert not (tmp_path / "generation_config.json").exists()


def test_a_token_without_text_leaves_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, config={}, tokenizer_config={"eos_token": "<s>"})
    name_end_token(tmp_path, 3)
    assert read(tmp_path, "tokenizer_config") == {"eos_token": "<s>"}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"generation_config\.json: must hold a JSON object and holds a list"):
        name_end_token(tmp_path, 3)
