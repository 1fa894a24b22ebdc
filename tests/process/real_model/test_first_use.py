"""What a first user meets with a real chat model, SmolLM2-135M-Instruct: conversion and the gateway.

``bash tests/run.sh real`` makes the model's folder and names it in ``DTA_REAL_MODEL``.
"""

import filecmp
import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from scripted_engine import ScriptedEngine
from tool_runs import run_tool
from verify_checkpoint_cases import verify

pytestmark = pytest.mark.skipif(
    not os.environ.get("DTA_REAL_MODEL"), reason="DTA_REAL_MODEL does not name the folder of a real model"
)
for package in ("transformers", "uvicorn", "starlette"):
    pytest.importorskip(package)

ASK = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(os.environ["DTA_REAL_MODEL"])


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(folder)


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
