"""Folders as published: the text model is trained, and what lies beside it is exported byte for byte."""

from __future__ import annotations

import filecmp
import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

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
from published_cases import CONFIGS, save_published
from tool_runs import run_tool
from verify_checkpoint_cases import verify

pytest.importorskip("transformers", reason="the other side needs transformers (extra 'test')")


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
    beside = [name for name in expected if name.startswith(("mtp.", "model.visual."))]
    assert len(beside) >= 15
    for name in beside:
        assert tensors[name].dtype is expected[name].dtype
        assert torch.equal(tensors[name], expected[name]), name
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in source.iterdir())


@pytest.mark.parametrize("case", CONFIGS)
def test_training_and_both_converters(case: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Started, resumed and exported; the converters bring every byte back; transformers computes the same."""
    source, run = tmp_path / "hf", tmp_path / "run"
    expected = save_published(source, case)
    beside = carried_text(expected)
    _, printed = train(tmp_path, 1, source)
    assert f"{beside}; exports hold them unchanged" in printed
    trainer, printed = train(tmp_path, 2, source, "--save-hf", str(tmp_path / "out"))
    assert f"{beside}; exports hold them unchanged" in printed
    assert_carried(tmp_path / "out", source)
    # Rollout servers get the names that they know from the folder, and every expert by itself.
    sent = hf_weights(trainer.config, trainer.model).shapes()
    prefix = "model.language_model." if "text_config" in CONFIGS[case] else "model."
    assert f"{prefix}embed_tokens.weight" in sent
    assert (f"{prefix}layers.0.mlp.experts.3.gate_proj.weight" in sent) == ("num_experts" in str(CONFIGS[case]))

    run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {source} --save {tmp_path}/megatron")
    assert f"not in it: {beside}; " in capsys.readouterr().out.replace("\n", " ")
    for checkpoint, target in ((tmp_path / "megatron", "back"), (run, "trained")):
        flags = f"--load {checkpoint} --hf-checkpoint {source} --save-hf {tmp_path}/{target}"
        run_tool(monkeypatch, "convert_megatron_to_hf", flags)
        assert_carried(tmp_path / target, source)
    names = [path.name for path in source.iterdir()]
    assert sorted(filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)[0]) == sorted(names)
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "trained", names, shallow=False)[1:] == ([], [])
    for folder, checkpoint in ((source, tmp_path / "megatron"), (tmp_path / "out", run)):
        status, summary, out = verify(monkeypatch, capsys, folder, checkpoint, "--seq-length", "20")
        assert status == 0, out
        assert f"not compared: {beside}" in out
        assert summary["tokens"] == 80


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


QUANTIZED = {
    "fp8": ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1)),
    "gptq": ("model.layers.0.mlp.up_proj.qweight", torch.ones(1, dtype=torch.int32)),
    "compressed-tensors": ("model.layers.0.mlp.up_proj.weight_packed", torch.ones(1, dtype=torch.int32)),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_refused(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    save_huggingface(source, "qwen3", 3, shard="1GB")
    name, values = QUANTIZED[kind]
    save_file({**tensors_in(source), name: values}, source / "model.safetensors")
    with pytest.raises(InputError, match=rf"holds quantized weights \({name}\), which cannot be trained"):
        to_megatron(source, tmp_path / "megatron")
    eight_bits = {name: values.to(torch.float8_e4m3fn) for name, values in tensors_in(source).items()}
    del eight_bits[name]
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
