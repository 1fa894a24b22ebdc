"""Trains with and without drafts on additions in columns whose prompts repeat, and reads the samples of each run."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_dta.common.errors import InputError
from megatron_dta.common.files import read_json, replace_text
from megatron_dta.rollouts import Rollout, load_rollouts, write_rollouts
from megatron_dta.training.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]
SOLVED = f"{ROOT}/examples/scratchpad.py:reward"
RIGHT_SHARE = f"{ROOT}/benchmarks/papers/das_parts/rewards.py:right_share"
PLAIN, EXACT, CLOCK = "plain", "drafts, no clock", "drafts"
"""Modes of a run. Drafting normally follows measured times. With --deterministic-mode it follows a default cost."""
DRAFTS = ("--rollout-speculation", "das")
FINISHED, SAMPLES = "finished.json", "samples"


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

    @property
    def update_sizes(self) -> list[float]:
        """Sum of the learning rates of each rollout batch's steps."""
        sizes: list[float] = []
        for record in self.records:
            sizes = sizes if record["rollout_batch_step"] else [*sizes, 0.0]
            sizes[-1] += record["learning_rate"]
        return sizes

    def lengths(self) -> list[np.ndarray]:
        """Tokens of each response by rollout batch, int64 [rollouts]."""
        return [np.array([rollout.loss_mask.sum() for rollout in batch]) for batch in self.batches]

    def drafts(self, name: str) -> int:
        """Sum of the metric ``speculation_NAME``."""
        return int(sum(record["timing"].get(f"speculation_{name}", 0.0) for record in self.sampled))


def scratchpad() -> SimpleNamespace:
    """What ``examples/scratchpad.py`` defines."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "scratchpad.py")))


def write_task(task: LiveTask, folder: Path) -> None:
    """Write ``warmup.jsonl``, ``prompts.jsonl`` and ``held_out.jsonl``: problems of all sizes in their shares."""
    example, random = scratchpad(), np.random.default_rng(1)
    total, left_out = sum(task.digits.values()), set()
    parts: dict[str, list[np.ndarray]] = {"held_out": [], "prompts": [], "warmup": []}
    for digits, prompts in task.digits.items():
        shape = task.base, digits, task.examples
        held_out = list(example.draw_prompts(max(1, task.held_out * prompts // total), *shape, random, set()))
        left_out |= {example.problem_text(*problem[-1]) for problem in held_out}
        parts["held_out"] += held_out
        parts["prompts"] += example.draw_prompts(prompts, *shape, random, left_out)
        parts["warmup"] += example.draw_prompts(max(1, task.solved * prompts // total), *shape, random, left_out)
    folder.mkdir(parents=True, exist_ok=True)
    for problems in parts.values():
        random.shuffle(problems)
    solved = [example.warmup_rollout(problem, task.base, task.carelessness, random) for problem in parts["warmup"]]
    write_rollouts(folder / "warmup.jsonl", solved)
    for name in ("prompts", "held_out"):
        records = [example.prompt_record(problem, task.base) for problem in parts[name]]
        example.write_lines(folder / f"{name}.jsonl", records)


def prepare(task: LiveTask, folder: Path) -> None:
    """Write the task's files and train the weights from which all runs of the task begin."""
    found = read_json(folder / "task.json") if (folder / "task.json").exists() else None
    settings = json.loads(json.dumps(asdict(task)))
    if found != settings:
        shutil.rmtree(folder, ignore_errors=True)
        write_task(task, folder / "data")
        replace_text(folder / "task.json", json.dumps(settings, indent=1) + "\n")
    flags = f"{task.model} {task.warmup} --seed 1 --objective sft --log-interval 50".split()
    train(folder / "warmup", [*flags, "--rollouts", f"{folder}/data/warmup.jsonl"])


def live_run(task: LiveTask, folder: Path, seed: int, mode: str) -> LiveRun:
    """Train from the warm-up, or read the run if it is complete."""
    here = folder / f"seed{seed}-{mode.replace(', ', '-').replace(' ', '-')}"
    flags = f"{task.model} {task.training} --seed {seed} --n-samples-per-prompt {task.samples}".split()
    flags += f"--rollout-batch-size {task.batch} --tokenizer-type CharacterTokenizer --old-logprobs recompute".split()
    flags += ["--load", f"{folder}/warmup", "--finetune", "--prompt-data", f"{folder}/data/prompts.jsonl"]
    flags += ["--reward-function", task.reward, "--eval-prompt-data", f"{folder}/data/held_out.jsonl"]
    flags += ["--save-rollouts-interval", "1", "--save-rollouts-groups", str(task.batch)]
    flags += DRAFTS if mode != PLAIN else ()
    flags += ["--deterministic-mode"] if task.deterministic and mode != CLOCK else []
    train(here, flags, keep_samples)
    return read_run(here)


def train(folder: Path, flags: Sequence[str], after: Callable[[Path], None] | None = None) -> None:
    """Run ``megatron_dta.train``, then ``after``, unless ``folder`` has a complete run of these flags."""
    marker = folder / FINISHED
    if marker.exists() and read_json(marker) == list(flags):
        print(f"{folder}: complete", flush=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{folder}: training", flush=True)
    arguments, log = [*flags, "--save", str(folder)], folder / "train.log"
    if torch.cuda.is_available():
        with open(log, "w", encoding="utf-8") as output:
            command = [sys.executable, "-m", "megatron_dta.train", *arguments]
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    else:
        status = _forked(arguments, log)
    if status:
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
        raise InputError(f"{log}: training ended with status {status}: " + " | ".join(tail))
    if after is not None:
        after(folder)
    replace_text(marker, json.dumps(list(flags)) + "\n")


def _forked(arguments: Sequence[str], log: Path) -> int:
    """The exit status of a training process forked off one that has imported Megatron, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["papers.das_parts.preloaded"])
    # Python 3.11 does not tell the server where to find the modules.
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        process = context.Process(target=_train_here, args=(list(arguments), str(log)))
        process.start()
        process.join()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {} if given is None else {"PYTHONPATH": given}
    return int(process.exitcode or 0)


def _train_here(arguments: list[str], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from megatron_dta.common.errors import run_entry_point
    from megatron_dta.train import main

    sys.argv = ["megatron_dta.train", *arguments]
    run_entry_point(main)


def keep_samples(folder: Path) -> None:
    """Keep the tokens and rewards of a run's samples, and remove its checkpoints."""
    (folder / SAMPLES).mkdir(exist_ok=True)
    for path in sorted((folder / "rollouts").glob("step_???????.jsonl")):
        kept = [
            Rollout(rollout.token_ids, rollout.loss_mask, reward=rollout.reward, group_id=rollout.group_id)
            for rollout in load_rollouts(path)
        ]
        write_rollouts(folder / SAMPLES / path.name, kept)
    shutil.rmtree(folder / "rollouts")
    for path in folder.glob("iter_*"):
        shutil.rmtree(path)
    (folder / "latest_checkpointed_iteration.txt").unlink(missing_ok=True)


def read_run(folder: Path) -> LiveRun:
    """The metrics and samples of a complete run."""
    metrics = read_metrics(folder / "metrics.jsonl")
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
