"""Trains a small model on arithmetic with the sequences dense, packed, in trees, and by the longest path of each tree.

First supervised, on trees of solved problems that share their left operand and operator; then GRPO on samples of the
model itself, where a tree is the group of a problem. Weights and arithmetic are in float64, so that curves that differ
by rounding alone can be told from those that do not. All ways train the same problems in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_dta.common.keyed_random import Domain
from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.advantages import group_advantages
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.sampling.in_process.engine import InProcessEngine
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.arithmetic import ArithmeticTask
from megatron_dta.sampling.prompts.load import Prompt
from papers.tree_training_parts.longest_path import longest_paths, small_model

WAYS = ("dense", "packed", "dta", "longest path")
SEGMENT_TOKENS = 256
HELD_OUT_POINTS = 15


@dataclass(frozen=True)
class CurveSettings:
    """Length of the phases, and a step's trees and sequences of each."""

    sft_steps: int
    grpo_steps: int
    trees: int = 16
    branches: int = 8
    max_operand: int = 49
    sft_lr: float = 2e-3
    grpo_lr: float = 6e-4


@dataclass
class Curves:
    """What a run records.

    Attributes:
        sft_loss, grpo_loss, reward: of each step.
        held_out_loss: on held-out problems, after the supervised steps ``held_out_steps``.
        held_out_after_sft, held_out: share of held-out problems that are solved after each phase.
    """

    sft_loss: list[float] = field(default_factory=list)
    grpo_loss: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)
    held_out_steps: list[int] = field(default_factory=list)
    held_out_after_sft: float = 0.0
    held_out: float = 0.0

    def largest_difference(self, other: Curves) -> dict[str, float]:
        """Largest difference from another run's losses and rewards at any step."""
        names = ("sft_loss", "held_out_loss", "grpo_loss", "reward")
        pairs = {name: np.subtract(getattr(self, name), getattr(other, name)) for name in names}
        return {f"{name}_difference": float(np.abs(values).max(initial=0.0)) for name, values in pairs.items()}


class CurveRun:
    """One run: a model, its optimizer and its problems.

    Args:
        way: one of ``WAYS``.
        seed: of weights, problems and samples.
    """

    def __init__(self, way: str, seed: int, settings: CurveSettings) -> None:
        self._is_longest, self._seed, self._settings = way == "longest path", seed, settings
        self._tree = TreeConfig(tree_mode="dense" if self._is_longest else way, tree_segment_tokens=SEGMENT_TOKENS)
        self._task = ArithmeticTask(settings.max_operand)
        self._answer_tokens = self._task.longest_answer_tokens
        vocab_size = self._task.tokenizer.vocab_size
        model = build_model(small_model(vocab_size, 32, hidden_size=128), initialize_parallel(seed))
        self._engine, self._sampler = TreeEngine(model), InProcessEngine(model)
        self._optimizer = torch.optim.AdamW(model.parameters(), settings.sft_lr, (0.9, 0.95), weight_decay=0.0)
        self._by_operand: dict[str, list[Prompt]] = {}
        for prompt in self._task.train_prompts:
            self._by_operand.setdefault(prompt.record["question"].split("+")[0], []).append(prompt)

    def run(self) -> Curves:
        """Train both phases."""
        curves, settings = Curves(), self._settings
        supervised, policy = (make_objective(ObjectiveConfig(objective=name)) for name in ("sft", "grpo"))
        for step in range(settings.sft_steps):
            curves.sft_loss.append(self._update(*self._solved(step), supervised))
            if (step + 1) % max(1, settings.sft_steps // HELD_OUT_POINTS) == 0:
                curves.held_out_steps.append(step + 1)
                curves.held_out_loss.append(self._held_out_loss())
        curves.held_out_after_sft = self._solved_share(0)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.grpo_lr
        for step in range(settings.grpo_steps):
            samples, groups, reward = self._sampled(step)
            curves.reward.append(reward)
            curves.grpo_loss.append(self._update(samples, groups, policy))
        curves.held_out = self._solved_share(1)
        return curves

    def _update(self, samples: list[TrainingSample], groups: np.ndarray, objective: Objective) -> float:
        if self._is_longest:
            kept = longest_paths(np.array([len(sample.token_ids) for sample in samples]), groups)
            samples = [samples[i] for i in kept]
        self._optimizer.zero_grad()
        result = self._engine.forward_backward(prepare_batch(samples, self._tree), objective)
        torch.nn.utils.clip_grad_norm_(self._engine.tree_models[0].parameters(), 1.0)
        self._optimizer.step()
        return float(result.loss)

    def _solved(self, step: int) -> tuple[list[TrainingSample], np.ndarray]:
        """Trees of solved problems with one left operand each."""
        generator, settings = np.random.default_rng((self._seed, step, 21)), self._settings
        operands = [name for name, rows in self._by_operand.items() if len(rows) >= settings.branches]
        samples = []
        for operand in generator.choice(sorted(operands), settings.trees, replace=False):
            rows = self._by_operand[str(operand)]
            for i in generator.choice(len(rows), settings.branches, replace=False):
                samples.append(self._sample(rows[i], self._encode_answer(rows[i])))
        return samples, np.repeat(np.arange(settings.trees), settings.branches)

    def _sampled(self, step: int) -> tuple[list[TrainingSample], np.ndarray, float]:
        """Groups of answers that the model samples, with their advantages and the mean reward."""
        generator, settings = np.random.default_rng((self._seed, step, 22)), self._settings
        chosen = generator.choice(len(self._task.train_prompts), settings.trees, replace=False)
        prompts = [self._task.train_prompts[i] for i in chosen for _ in range(settings.branches)]
        responses = self._generate(prompts, step, Domain.SAMPLING)
        groups = np.repeat(np.arange(settings.trees), settings.branches)
        rewards = self._rewards(prompts, responses)
        advantages = group_advantages(rewards, [str(group) for group in groups])
        samples = [
            replace(self._sample(prompt, response), advantages=np.full(len(prompt.token_ids) + len(response), value))
            for prompt, response, value in zip(prompts, responses, advantages, strict=True)
        ]
        return samples, groups, float(np.mean(rewards))

    def _generate(self, prompts: list[Prompt], iteration: int, domain: Domain) -> list[np.ndarray]:
        eos = self._task.tokenizer.eos_id
        self._sampler.start(SamplingParams(self._answer_tokens, eos, seed=self._seed, domain=domain), iteration)
        requests = [
            GenerationRequest(i, prompt.token_ids, self._answer_tokens, key=iteration * 2**20 + i)
            for i, prompt in enumerate(prompts)
        ]
        return [result.token_ids for result in generate(self._sampler, requests)]

    def _held_out_loss(self) -> float:
        samples = [self._sample(prompt, self._encode_answer(prompt)) for prompt in self._task.held_out_prompts]
        logprobs = self._engine.compute_logprobs(prepare_batch(samples, replace(self._tree, tree_mode="dta")))
        return -float(
            sum(sample_logprobs.sum() for sample_logprobs in logprobs) / sum(sample.num_trained for sample in samples)
        )

    def _solved_share(self, iteration: int) -> float:
        """Share of held-out problems whose sampled answer is right."""
        prompts = self._task.held_out_prompts
        responses = self._generate(prompts, iteration, Domain.EVALUATION)
        return float(np.mean([reward == 1 for reward in self._rewards(prompts, responses)]))

    def _rewards(self, prompts: list[Prompt], responses: list[np.ndarray]) -> list[float]:
        """The share of tokens that are right, so that a model that solves nothing yet has something to learn from."""
        rewards = []
        for prompt, response in zip(prompts, responses, strict=True):
            answer = self._encode_answer(prompt)
            same = min(len(answer), len(response))
            right = np.count_nonzero(answer[:same] == response[:same])
            rewards.append(float(right / max(len(answer), len(response))))
        return rewards

    def _encode_answer(self, prompt: Prompt) -> np.ndarray:
        tokenizer = self._task.tokenizer
        return np.append(tokenizer.encode(str(prompt.record["answer"])), np.int32(tokenizer.eos_id))

    @staticmethod
    def _sample(prompt: Prompt, answer: np.ndarray) -> TrainingSample:
        token_ids = np.concatenate([prompt.token_ids, answer]).astype(np.int32)
        return TrainingSample(token_ids, np.arange(len(token_ids)) >= len(prompt.token_ids))
