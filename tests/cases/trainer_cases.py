"""Random rollouts and a small trainer to run on them."""

import io
import json
from pathlib import Path

import numpy as np

from megatron_dta.common.console import Console
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.loop import Trainer
from megatron_dta.wiring.setup import build_trainer

VOCABULARY = 17
MODEL = (
    "--num-layers 1 --hidden-size 24 --num-attention-heads 3 --swiglu --disable-bias-linear "
    f"--max-position-embeddings 32 --vocab-size {VOCABULARY} --lr 1e-2"
)


def make_rollouts(rng: np.random.Generator, groups: int, per_group: int, logprobs: bool = True) -> list[Rollout]:
    """Groups that share a prompt; random rewards, masks and logprobs."""
    rollouts = []
    for group in range(groups):
        prompt = rng.integers(0, VOCABULARY, rng.integers(1, 6))
        for _ in range(per_group):
            tokens = np.concatenate([prompt, rng.integers(0, 3, rng.integers(1, 9))]).astype(np.int32)
            mask = (np.arange(len(tokens)) >= len(prompt)) & (rng.random(len(tokens)) < 0.9)
            mask[-1] = True
            sampled = np.where(mask, -rng.random(len(tokens)), 0).astype(np.float32)
            reward = float(rng.standard_normal())
            rollouts.append(
                Rollout(tokens, mask, reward=reward, logprobs=sampled if logprobs else None, group_id=f"g{group}")
            )
    return rollouts


def make_trainer(arguments: str, model: str = MODEL) -> tuple[Trainer, io.StringIO]:
    output = io.StringIO()
    trainer = build_trainer(parse_arguments(f"{model} {arguments}".split()), Console(file=output, width=400))
    return trainer, output


def run(arguments: str, model: str = MODEL) -> tuple[Trainer, str]:
    trainer, output = make_trainer(arguments, model)
    try:
        trainer.run()
    finally:
        trainer.metrics.close()
    return trainer, output.getvalue()


def run_until(stop: int, arguments: str, model: str = MODEL) -> Trainer:
    """Train as if a signal came in step ``stop``."""
    trainer, _ = make_trainer(arguments, model)
    plain = trainer._step

    def step() -> dict:
        record = plain()
        trainer.signals.name = "SIGTERM" if record["iteration"] == stop else None
        return record

    trainer._step = step
    trainer.run()
    trainer.metrics.close()
    return trainer


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
