"""Conversion of a LoRA run's last checkpoint to Hugging Face, and the rollouts to train on."""

from pathlib import Path

import numpy as np

from conftest import REPOSITORY, seed_all
from forked import run_python
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout


def hf_rollouts(path: Path, seed: int) -> None:
    rng, rollouts = seed_all(seed), []
    for group in range(4):
        prompt = rng.integers(0, 37, 4)
        for _ in range(3):
            tokens = np.concatenate([prompt, rng.integers(0, 37, rng.integers(2, 9))]).astype(np.int32)
            rollouts.append(
                Rollout(tokens, np.arange(len(tokens)) >= 4, reward=float(rng.normal()), group_id=str(group))
            )
    write_rollouts(path, rollouts)


def convert(run_folder: Path, template: Path, target: Path, *flags: str) -> Path:
    """The Hugging Face folder that the tool makes of a run's last checkpoint."""
    tool = REPOSITORY / "tools" / "convert_megatron_to_hf.py"
    command = [tool, "--load", run_folder, "--hf-checkpoint", template]
    done = run_python([*command, "--save-hf", target, *flags])
    assert done.returncode == 0, done.stdout + done.stderr
    return target
