"""A real chat model: prompts, greedy tokens, ends of turns and logprobs are those of transformers.

``bash tests/run.sh real`` makes the model's folder and names it in ``DTA_REAL_MODEL``.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dta.core.config import ModelConfig
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.sampling.in_process.engine import EngineSettings, InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, generate, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import HuggingFaceTokenizer
from megatron_dta.training.huggingface.config.config import architecture, read_hf_config, settings_from_hf
from megatron_dta.training.huggingface.mappings import ModelShape
from megatron_dta.training.huggingface.weights import HfWeights

FOLDER = os.environ.get("DTA_REAL_MODEL", "")
pytestmark = pytest.mark.skipif(not FOLDER, reason="DTA_REAL_MODEL does not name the folder of a real model")

QUESTIONS = ("What is the capital of France?", "Write the word tree.", "What is 3 + 4? Answer with the number only.")
LENGTH = 40


@dataclass
class Both:
    """The same weights in this package and in transformers."""

    ours: torch.nn.Module
    reference: Any
    tokenizer: Any
    prompts: list[np.ndarray]

    def sample(self, temperature: float) -> list[GenerationResult]:
        engine = InProcessEngine(self.ours, EngineSettings(max_requests=3))
        params = SamplingParams(LENGTH, self.tokenizer.eos_token_id, temperature, seed=5)
        requests = [GenerationRequest(i, prompt, LENGTH, key=i) for i, prompt in enumerate(self.prompts)]
        with phase(engine, params, iteration=0):
            results = generate(engine, requests)
        engine.close()
        return results

    @torch.no_grad()
    def reference_logprobs(self, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        """float32 [R], of one sequence in one pass."""
        token_ids = torch.as_tensor(np.concatenate([prompt, response]), dtype=torch.int64)
        logits = self.reference(input_ids=token_ids[None]).logits[0, len(prompt) - 1 : -1]
        return logits.float().log_softmax(-1)[torch.arange(len(response)), token_ids[len(prompt) :]].numpy()


def both(dtype: torch.dtype) -> Both:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = initialize_parallel(seed=1)
    config = ModelConfig(**settings_from_hf(FOLDER, {"max_position_embeddings": 256}), params_dtype=dtype)
    ours = build_model(config, device)
    HfWeights([ours], architecture(read_hf_config(FOLDER)).architecture, ModelShape.of(config)).load(FOLDER)
    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype, attn_implementation="eager").eval()
    encode, template = HuggingFaceTokenizer(FOLDER).encode, ChatTemplate(FOLDER)
    prompts = [encode(template.prompt(question)) for question in QUESTIONS]
    return Both(ours, reference, AutoTokenizer.from_pretrained(FOLDER), prompts)


@pytest.fixture(scope="module")
def float32() -> Both:
    return both(torch.float32)


def test_prompts_are_those_of_the_template(float32: Both) -> None:
    for question, prompt in zip(QUESTIONS, float32.prompts, strict=True):
        messages = [{"role": "user", "content": question}]
        rendered = float32.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert prompt.tolist() == rendered["input_ids"]


def test_greedy_tokens_and_ends_are_those_of_transformers(float32: Both) -> None:
    """Three requests in one batch, against one sequence at a time."""
    ends = 0
    for prompt, result in zip(float32.prompts, float32.sample(temperature=0), strict=True):
        input_ids = torch.as_tensor(prompt, dtype=torch.int64)[None]
        expected = float32.reference.generate(input_ids, do_sample=False, max_new_tokens=LENGTH)[0, len(prompt) :]
        assert result.token_ids.tolist() == expected.tolist()
        ends += result.ended
        assert result.ended == (result.token_ids[-1] == float32.tokenizer.eos_token_id)
    assert ends  # at least one answer ends by itself


def test_logprobs_are_those_of_transformers(float32: Both) -> None:
    for prompt, result in zip(float32.prompts, float32.sample(temperature=1), strict=True):
        assert np.abs(result.logprobs - float32.reference_logprobs(prompt, result.token_ids)).max() < 1e-4


def test_bfloat16_logprobs_are_as_near_to_float32_as_those_of_transformers(float32: Both) -> None:
    models = both(torch.bfloat16)
    ours, theirs = [], []
    for prompt, result in zip(models.prompts, models.sample(temperature=1), strict=True):
        exact = float32.reference_logprobs(prompt, result.token_ids)
        ours.append(result.logprobs - exact)
        theirs.append(models.reference_logprobs(prompt, result.token_ids) - exact)
    distances = [float(np.abs(np.concatenate(errors)).mean()) for errors in (ours, theirs)]
    assert 0 < distances[0] <= 1.25 * distances[1], distances
