"""Models trained from random weights are exported to Hugging Face without a given config.json."""

import filecmp
import json
from io import StringIO
from pathlib import Path

import pytest

from chat_folder import make_chat_folder
from conftest import seed_all
from lora_training_cases import hf_rollouts
from megatron_dta.common.console import Console
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.huggingface.config.config_output import config_from_settings
from megatron_dta.wiring.setup import build_trainer
from resume_cases import prompts_and_reward
from tool_runs import run_tool
from verify_checkpoint_cases import verify

transformers = pytest.importorskip("transformers", reason="reads what is written (extra 'test')")

SHAPE = (
    "--num-layers 2 --hidden-size 24 --num-attention-heads 4 --vocab-size 37 --max-position-embeddings 64 --swiglu "
    "--disable-bias-linear"
)
MODELS = {
    "llama": "--use-rope-scaling --untie-embeddings-and-output-weights --rotary-base 5000",
    "qwen2": "--add-qkv-bias --num-query-groups 2",
    "qwen3": "--qk-layernorm",
    "qwen3_moe": "--qk-layernorm --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_run_from_random_weights_exports(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    hf_rollouts(tmp_path / "r.jsonl", 43)
    arguments = (
        f"{SHAPE} {MODELS[name]} --rollouts {tmp_path}/r.jsonl --global-batch-size 6 --old-logprobs recompute "
        f"--train-iters 1 --lr 1e-2 --save {tmp_path}/run --save-hf {tmp_path}/hf"
    )
    seed_all(3)
    build_trainer(parse_arguments(arguments.split()), Console(file=StringIO(), width=400)).run()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == name
    # transformers computes the same, forward and backward.
    status, _, out = verify(monkeypatch, capsys, tmp_path / "hf", tmp_path / "run", "--seq-length", "40")
    assert status == 0, out
    # The converter writes the same from the checkpoint.
    run_tool(monkeypatch, "convert_megatron_to_hf", f"--load {tmp_path}/run --save-hf {tmp_path}/converted")
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert sorted(path.name for path in (tmp_path / "converted").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "hf", tmp_path / "converted", names, shallow=False)[0] == names
    assert not (tmp_path / "converted.template").exists()


def test_the_tokenizer_comes_along(tmp_path: Path, monkeypatch) -> None:
    make_chat_folder(tmp_path / "tokenizer")
    arguments = (
        f"{SHAPE.replace('--vocab-size 37 ', '')} {prompts_and_reward(tmp_path, seed_all(3))} "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}/tokenizer/tokenizer.json "
        f"--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 3 --train-iters 1 "
        f"--eval-interval 9 --save {tmp_path}/run --save-hf {tmp_path}/hf"
    )
    build_trainer(parse_arguments(arguments.split()), Console(file=StringIO(), width=400)).run()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert filecmp.cmp(tmp_path / "tokenizer" / name, tmp_path / "hf" / name, shallow=False)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 259


BASE = dict(num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=37, max_position_embeddings=64)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(), "--swiglu is False"),
        (dict(swiglu=True, disable_bias_linear=True, normalization="LayerNorm"), "--normalization is LayerNorm"),
    ],
)
def test_models_that_no_architecture_computes(settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_settings(ModelConfig(**BASE, **settings))


def test_a_name_of_the_hub_gets_the_command_that_downloads_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = (
        "Qwen/Qwen3-0.6B: no such folder; download the model with `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`"
    )
    for flag in ("--load-hf", "--hf-checkpoint"):
        with pytest.raises(InputError, match=message):
            parse_arguments([flag, "Qwen/Qwen3-0.6B", "--task", "arithmetic"])
    with pytest.raises(InputError, match=message):
        run_tool(monkeypatch, "convert_hf_to_megatron", "--hf-checkpoint Qwen/Qwen3-0.6B --save out")
