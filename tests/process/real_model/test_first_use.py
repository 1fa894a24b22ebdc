"""What a first user meets with a real chat model, SmolLM2-135M-Instruct: sampling, conversion, tools, the gateway.

``bash tests/run.sh real`` makes the model's folder and names it in ``DTA_REAL_MODEL``.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.extras.parity.huggingface import load_huggingface, to_huggingface, train_padding
from megatron_dta.extras.parity.one_pass import OnePass, differences, run_ours, run_reference, training_sample
from megatron_dta.sampling.environment import EnvironmentRunner
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import whole_text
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.sampling.tool_environment import ToolEnvironment
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights
from scripted_engine import ScriptedEngine
from tool_runs import run_tool
from verify_checkpoint_cases import FAULTS, verify

pytestmark = pytest.mark.skipif(
    not os.environ.get("DTA_REAL_MODEL"), reason="DTA_REAL_MODEL does not name the folder of a real model"
)
for package in ("transformers", "uvicorn", "starlette"):
    pytest.importorskip(package)

FAMILY = "LlamaForCausalLM"
ASK = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["DTA_REAL_MODEL"])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


def load(folder: Path, dtype: torch.dtype) -> tuple[TreeGPTModel, ModelConfig]:
    config = ModelConfig(**settings_from_hf(folder, {}), params_dtype=dtype)
    model = build_model(config, initialize_parallel(0)).eval()
    HfWeights(list(getattr(model, "model_chunks", [model])), FAMILY, ModelShape.of(config)).load(folder)
    return model, config


@pytest.fixture(scope="module")
def engine(folder: Path) -> InProcessEngine:
    return InProcessEngine(load(folder, torch.float32)[0])


@pytest.mark.parametrize("length", [1, 3])
def test_a_prompt_is_computed_once_for_its_group(length: int, engine: InProcessEngine, tokenizer) -> None:
    prompt = np.resize(tokenizer.encode("A prompt that all samples of a group begin with. "), 500)
    before = engine.statistics()
    engine.start(SamplingParams(length, eos_id=-1, seed=length), 0)
    results = generate(engine, [GenerationRequest(i, prompt, length, key=i) for i in range(8)])
    counts = {name: value - before[name] for name, value in engine.statistics().items()}
    assert [len(result.token_ids) for result in results] == [length] * 8
    assert counts["forwards"] == length + 1
    assert counts["prefilled_tokens"] == 500 + 7


def test_a_conversion_is_verified_both_ways(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run_tool(monkeypatch, "convert_hf_to_megatron", f"--hf-checkpoint {folder} --save {tmp_path}/megatron")
    flags = f"--load {tmp_path}/megatron --hf-checkpoint {folder} --save-hf {tmp_path}/back"
    run_tool(monkeypatch, "convert_megatron_to_hf", flags)
    assert filecmp.cmp(folder / "model.safetensors", tmp_path / "back" / "model.safetensors", shallow=False)
    flags = ("--num-sequences", "1", "--seq-length", "32")
    status, summary, out = verify(monkeypatch, capsys, tmp_path / "back", tmp_path / "megatron", *flags)
    assert status == 0, out
    assert summary["max_logits_difference"] < 1e-10
    assert summary["max_gradient_difference"] < 1e-10
    assert summary["max_weight_difference"] == 0


@pytest.fixture(scope="module")
def ours(folder: Path) -> OnePass:
    model, config = load(folder, torch.float64)
    return run_ours(model, lambda tensors: to_huggingface(tensors, config, FAMILY), [SAMPLE])


SAMPLE = training_sample(np.arange(5, 300, 31))


@pytest.mark.parametrize("fault", [None, *FAULTS], ids=lambda fault: fault.__name__ if fault else "none")
def test_faults_are_found(fault, folder: Path, ours: OnePass) -> None:
    reference = load_huggingface(folder)
    train_padding(reference)
    if fault is not None:
        fault(reference)
    worst: dict[str, float] = {}
    for row in differences(ours, run_reference(reference, [SAMPLE])):
        worst[row.kind] = max(row.relative, worst.get(row.kind, 0))
    if fault is None:
        assert max(worst.values()) < 1e-10
    else:
        # A hundred times what the command tolerates, and more.
        assert min(worst["logits"], worst["logprobs"], worst["gradient"]) > 1e-7
        assert (worst["weight"] > 1e-4) == (FAULTS[fault] is not None)


class Calculator(ToolEnvironment):
    tools: ClassVar = {"add": lambda a, b: a + b}

    def finish(self, answer):
        return 1.0


def test_answers_of_tools_are_in_the_models_template(folder: Path, tokenizer) -> None:
    template = ChatTemplate(folder)
    runner = EnvironmentRunner(Calculator, tokenizer, template=template)
    said = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    prompt, turn = tokenizer.encode(template.prompt(ASK)), tokenizer.encode(said + "<|im_end|>")
    states, _ = runner.reset([{}], [prompt])
    _, (outcome,) = runner.step(states, [turn])
    talk = [*ASK, {"role": "assistant", "content": said}, {"role": "tool", "content": "3"}]
    whole = template.prompt(talk)
    assert whole.endswith("<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
    token_ids = np.concatenate([prompt, turn, outcome.observation])
    assert whole_text(tokenizer, token_ids) == whole
    assert token_ids.tolist() == tokenizer.encode(whole).tolist()


def test_the_gateway_with_the_models_template(folder: Path, tokenizer) -> None:
    """Tools that the template does not write are refused; an emoji is several tokens, whose bytes are its own."""
    from open_gateway import open_gateway

    text = "well 🧑‍🚀 done"
    answer = [*tokenizer.encode(text).tolist(), tokenizer.eos_id]
    engine = ScriptedEngine(lambda prompt, key: answer, tokenizer.vocab_size)
    with open_gateway(engine, tokenizer, folder) as gateway:
        _, key = gateway.open()
        body = {"messages": ASK, "logprobs": True}
        whole = json.loads(post(gateway.url, key, body))["choices"][0]
        entries = whole["logprobs"]["content"]
        assert whole["message"]["content"] == text
        assert len(entries) == len(answer) > 8
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode() + b"<|im_end|>"
        lines = post(gateway.url, key, body | {"stream": True}).decode().split("\n\n")
        chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        assert [chunk["logprobs"]["content"] for chunk in chunks if chunk.get("logprobs")] == [entries]
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        with pytest.raises(urllib.error.HTTPError) as error:
            post(gateway.url, key, body | {"tools": tools})
        assert f"the chat template of {folder} does not write them" in error.value.read().decode()


def post(url: str, key: str, body: dict[str, Any]) -> bytes:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read()


def test_an_end_that_only_generation_config_names(folder: Path, tmp_path: Path, engine, tokenizer) -> None:
    prompt = tokenizer.encode(ChatTemplate(folder).prompt(ASK))

    def sample(named: HuggingFaceTokenizer) -> Any:
        ends = list(named.ends)
        engine.start(SamplingParams(6, ends[0], temperature=0, other_eos_ids=tuple(ends[1:])), 0)
        return generate(engine, [GenerationRequest(0, prompt, 6, key=0)])[0]

    plain = sample(tokenizer)
    assert not plain.ended
    end = int(plain.token_ids[3])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_id, end]}))
    named = HuggingFaceTokenizer(tmp_path)
    assert named.ends == {tokenizer.eos_id: "tokenizer_config.json", end: "generation_config.json"}
    result = sample(named)
    assert result.ended
    assert result.token_ids.tolist() == plain.token_ids[: plain.token_ids.tolist().index(end) + 1].tolist()
