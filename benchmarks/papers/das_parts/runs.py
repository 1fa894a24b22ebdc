"""Trains with and without drafts on additions in columns whose prompts repeat, and reads the samples of each run."""

from __future__ import annotations

import runpy
import shutil
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.monitor.metrics import read_metrics
from papers.processes import Job
from papers.training import METRICS, train, training_progress

ROOT = Path(__file__).resolve().parents[3]
SOLVED = f"{ROOT}/examples/scratchpad.py:reward"
RIGHT_SHARE = f"{ROOT}/benchmarks/papers/das_parts/rewards.py:right_share"
PLAIN, EXACT, CLOCK = "plain", "drafts, no clock", "drafts"
"""Modes of a run. Drafting normally follows measured times. With --deterministic-mode it follows a default cost."""
DRAFTS = ("--rollout-speculation", "das")
SAMPLES = "samples"


@dataclass(frozen=True)
class LiveTask:
    """A task and how it is trained.

    Attributes:
        digits: number of prompts by digits of their numbers; a response has four tokens for each digit.
        carelessness: probability that the teacher of the warm-up forgets a carry.
        solved: solved problems of the warm-up.
        model: flags of the model and of the trees.
        warmup: flags of the warm-up.
        training: flags of the reinforcement learning.
        batch: prompts of a rollout batch.
        samples: samples of a prompt.
        modes: modes to run; the others are compared with the first one.
        deterministic: train with --deterministic-mode in all modes but ``CLOCK``.
        reward: the reward function.
    """

    name: str
    base: int
    digits: dict[int, int]
    examples: int
    carelessness: float
    held_out: int
    solved: int
    model: str
    warmup: str
    training: str
    batch: int
    samples: int
    modes: tuple[str, ...]
    seeds: int
    deterministic: bool = True
    reward: str = SOLVED

    @property
    def folder(self) -> str:
        """The folder of its runs."""
        return self.name.replace(" ", "-")

    @property
    def batches_per_epoch(self) -> int:
        """Rollout batches in which each prompt is sampled once."""
        return max(1, sum(self.digits.values()) // self.batch)


@dataclass(frozen=True)
class LiveRun:
    """What a finished run has left.

    Attributes:
        records: its metrics by step, without the evaluation before the first step.
        evaluations: (step, held-out reward).
        batches: rollouts of each rollout batch.
    """

    records: list[dict[str, Any]]
    evaluations: list[tuple[int, float]]
    batches: list[list[Rollout]]

    @cached_property
    def sampled(self) -> list[dict[str, Any]]:
        """The records of the first step of each rollout batch."""
        return [record for record in self.records if not record["rollout_batch_step"]]

    @property
    def rollout_seconds(self) -> list[float]:
        """Seconds to sample each rollout batch."""
        return [record["timing"]["collect_seconds"] for record in self.sampled]

    def lengths(self) -> list[np.ndarray]:
        """Tokens of each response by rollout batch, int64 [rollouts]."""
        return [np.array([rollout.loss_mask.sum() for rollout in batch]) for batch in self.batches]

    def drafts(self, name: str) -> int:
        """Sum of the metric ``speculation_NAME``."""
        return int(sum(record["timing"].get(f"speculation_{name}", 0.0) for record in self.sampled))


def scratchpad() -> SimpleNamespace:
    """What ``examples/scratchpad.py`` defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "scratchpad.py")))


def data_job(task: LiveTask) -> Job:
    """Writes ``warmup.jsonl``, ``prompts.jsonl`` and ``held_out.jsonl``: problems of all sizes in their shares."""
    sizes = asdict(task)
    names = ("base", "examples", "carelessness", "held_out", "solved")
    shares = [[digits, prompts] for digits, prompts in task.digits.items()]
    return Job(f"{task.folder}/data", write_task, {"shares": shares, **{name: sizes[name] for name in names}})


def write_task(
    folder: Path, shares: list[list[int]], base: int, examples: int, carelessness: float, held_out: int, solved: int
) -> None:
    """The function of ``data_job``."""
    example, random = scratchpad(), np.random.default_rng(1)
    total, left_out = sum(prompts for _, prompts in shares), set()
    parts: dict[str, list[np.ndarray]] = {"held_out": [], "prompts": [], "warmup": []}
    for digits, prompts in shares:
        shape = base, digits, examples
        kept = list(example.draw_prompts(max(1, held_out * prompts // total), *shape, random, set()))
        left_out |= {example.problem_text(*problem[-1]) for problem in kept}
        parts["held_out"] += kept
        parts["prompts"] += example.draw_prompts(prompts, *shape, random, left_out)
        parts["warmup"] += example.draw_prompts(max(1, solved * prompts // total), *shape, random, left_out)
    for problems in parts.values():
        random.shuffle(problems)
    rollouts = [example.warmup_rollout(problem, base, carelessness, random) for problem in parts["warmup"]]
    write_rollouts(folder / "warmup.jsonl", rollouts)
    for name in ("prompts", "held_out"):
        example.write_lines(folder / f"{name}.jsonl", [example.prompt_record(p, base) for p in parts[name]])


def warmup_job(task: LiveTask, data: Path) -> Job:
    """Trains the weights from which all runs of the task begin."""
    flags = f"{task.model} {task.warmup} --seed 1 --objective sft --log-interval 50".split()
    flags += ["--rollouts", str(data / "warmup.jsonl")]
    return Job(f"{task.folder}/warmup", train, {"flags": flags}, training_progress)


def live_job(task: LiveTask, data: Path, warmup: Path, seed: int, mode: str) -> Job:
    """Trains from the warm-up, and keeps the samples."""
    name = f"{task.folder}/seed{seed}-{mode.replace(', ', '-').replace(' ', '-')}"
    flags = f"{task.model} {task.training} --seed {seed} --n-samples-per-prompt {task.samples}".split()
    flags += f"--rollout-batch-size {task.batch} --tokenizer-type CharacterTokenizer --old-logprobs recompute".split()
    flags += ["--load", str(warmup / "checkpoint"), "--finetune", "--prompt-data", str(data / "prompts.jsonl")]
    flags += ["--reward-function", task.reward, "--eval-prompt-data", str(data / "held_out.jsonl")]
    flags += ["--save-rollouts-interval", "1"]
    flags += DRAFTS if mode != PLAIN else ()
    flags += ["--deterministic-mode"] if task.deterministic and mode != CLOCK else []
    return Job(name, train_and_keep_samples, {"flags": flags}, training_progress)


def train_and_keep_samples(folder: Path, flags: list[str]) -> None:
    """Train, keep the tokens and rewards of the samples, and remove the checkpoints."""
    train(folder, flags)
    (folder / SAMPLES).mkdir()
    for path in sorted((folder / "checkpoint" / "rollouts").glob("step_???????.jsonl")):
        kept = [
            Rollout(rollout.token_ids, rollout.loss_mask, reward=rollout.reward, group_id=rollout.group_id)
            for rollout in load_rollouts(path)
        ]
        write_rollouts(folder / SAMPLES / path.name, kept)
    shutil.rmtree(folder / "checkpoint")


def read_run(folder: Path) -> LiveRun:
    """The metrics and samples of a complete run."""
    metrics = read_metrics(folder / METRICS)
    records = [record for record in metrics if "loss" in record]
    batches: list[list[Rollout]] = []
    for record in records:
        batches += [] if record["rollout_batch_step"] else [[]]
        batches[-1] += load_rollouts(folder / SAMPLES / f"step_{record['iteration']:07d}.jsonl")
    rewards = [(record["iteration"], record["eval_reward"]) for record in metrics if "eval_reward" in record]
    return LiveRun(records, rewards, batches)


def equal_batches(a: LiveRun, b: LiveRun) -> int:
    """The number of first rollout batches in which both runs have the same samples, token for token."""
    pairs = zip(a.batches, b.batches, strict=True)
    same = [len(x) == len(y) and all(_same(r, s) for r, s in zip(x, y, strict=True)) for x, y in pairs]
    return same.index(False) if False in same else len(same)


def equal_share(a: LiveRun, b: LiveRun) -> float:
    """The share of equal samples in all rollout batches."""
    pairs = [pair for x, y in zip(a.batches, b.batches, strict=True) for pair in zip(x, y, strict=False)]
    return sum(_same(r, s) for r, s in pairs) / max(1, len(pairs))


def largest_difference(a: LiveRun, b: LiveRun, name: str) -> float:
    """The largest difference of a metric between the same steps of two runs."""
    return max(abs(x[name] - y[name]) for x, y in zip(a.records, b.records, strict=True))


def _same(a: Rollout, b: Rollout) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.loss_mask, b.loss_mask)
