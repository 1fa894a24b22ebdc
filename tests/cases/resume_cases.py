"""Prompts, rewards, metrics and final tensors of runs that are interrupted and resumed."""

import json
from pathlib import Path

import numpy as np
import torch
from megatron.core import dist_checkpointing

from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.training.checkpoint.files import find_checkpoint

# Draws from the two global generators that a user's function may use: they are part of what a checkpoint restores.
REWARD = """
import random
import numpy

def reward(prompt, response, response_token_ids):
    return len(set(response)) + random.random() + numpy.random.standard_normal()
"""


def rows_without_timing(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        del row["timing"]
    return rows


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    initialize_parallel(0)
    state = dist_checkpointing.serialization.load_plain_tensors(str(find_checkpoint(folder)))
    return {key: values for key, values in state.items() if isinstance(values, torch.Tensor)}


def prompts_and_reward(folder: Path, rng: np.random.Generator) -> str:
    for name, count in (("prompts", 9), ("held_out", 6)):
        lines = [json.dumps({"prompt": f"{a}+{b}="}) for a, b in rng.integers(0, 99, (count, 2))]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "reward.py").write_text(REWARD)
    files = f"--prompt-data {folder}/prompts.jsonl --eval-prompt-data {folder}/held_out.jsonl"
    return f"{files} --reward-function {folder}/reward.py:reward"
