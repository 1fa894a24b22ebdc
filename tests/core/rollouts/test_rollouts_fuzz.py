"""Damaged and random rollout files give records, or one ``InputError`` that names the file."""

import random
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from rollout_cases import GOOD_NPZ, damage, random_rollout


def load_or_refuse(path: Path) -> tuple[list[Rollout], str]:
    """The records or the message; anything but an ``InputError`` of one line with the file's name fails the test."""
    try:
        rollouts = load_rollouts(path, sample_granularity="turn", vocab_size=2**31)
    except InputError as error:
        message = str(error)
        assert message.startswith(f"{path}: ")
        assert message.isprintable()
        assert len(message) < len(str(path)) + 400
        return [], message
    assert rollouts
    return rollouts, ""


def damaged_files(path: Path, seed: int, count: int) -> int:
    """Write and load ``count`` damaged variants of ``path``; returns how many were refused."""
    rng = random.Random(seed)
    content, refused = path.read_bytes(), 0
    for _ in range(count):
        edited = content
        for _ in range(rng.randrange(1, 4)):
            edited = damage(edited, rng) or b"x"
        path.write_bytes(edited)
        refused += bool(load_or_refuse(path)[1])
    return refused


def small_rollouts(seed: int) -> list[Rollout]:
    rng = seed_all(seed)
    return [random_rollout(rng, length) for length in (2, 3, 9, 4)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("form", [".jsonl", ".npz"])
def test_random_damage(tmp_path: Path, form: str, seed: int) -> None:
    path = tmp_path / f"r{form}"
    if form == ".npz":
        (np.savez, np.savez_compressed)[seed % 2](path, **GOOD_NPZ)
    else:
        write_rollouts(path, small_rollouts(seed))
    assert damaged_files(path, seed, 150) > 75
