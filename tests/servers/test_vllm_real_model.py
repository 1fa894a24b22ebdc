"""A real vLLM on a CPU answers with the greedy tokens of transformers, from the folder of a real chat model.

``DTA_REAL_MODEL`` names the folder: the model itself, or what a run wrote with ``--save-hf``.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import vllm_process
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.vllm import VllmProtocol
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from vllm_cases import SETTINGS, logprobs_of
from vllm_process import VllmProcess
from weight_receiver import IdGroup

FOLDER = os.environ.get("DTA_REAL_MODEL", "")
pytestmark = [
    pytest.mark.skipif(vllm_process.PYTHON is None, reason=vllm_process.WHY_SKIPPED),
    pytest.mark.skipif(not FOLDER, reason="DTA_REAL_MODEL does not name the folder of a real model"),
]
LENGTH = 24


def test_greedy_answers_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    prompts = []
    for question in ("What is the capital of France?", "What is 10 + 7? Answer with the number only."):
        messages = [{"role": "user", "content": question}]
        prompts.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    server = VllmProcess(tmp_path, Path(FOLDER), "gloo")
    try:
        server.start()
        server.wait()
        engine = HttpEngine(VllmProtocol(open_group=IdGroup), [server.url], SETTINGS, vocab_size=len(tokenizer))
        engine.start(SamplingParams(LENGTH, tokenizer.eos_token_id, temperature=0), 0)
        requests = [GenerationRequest(i, np.array(ids, np.int32), LENGTH, key=i) for i, ids in enumerate(prompts)]
        results = generate(engine, requests)
        engine.close()
    finally:
        server.kill()
    for prompt, result in zip(prompts, results, strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LENGTH)[0, len(prompt) :]
        assert result.token_ids.tolist() == expected.tolist()
        logprobs = logprobs_of(model, [*prompt, *expected.tolist()])[len(prompt) - 1 :]
        assert np.abs(result.logprobs - logprobs.numpy()).max() < 1e-3
