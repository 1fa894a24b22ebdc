"""The lengths that the benchmark simulates, and what trees save at the setting that is quoted."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from conftest import REPOSITORY

ROOT = REPOSITORY
sys.path.insert(0, str(ROOT / "benchmarks"))

from common.simulated_lengths import LengthDistribution  # noqa: E402


@pytest.mark.parametrize("longer_than", [0, 1, 40, 300])
def test_lengths_are_lognormal_given_that_they_are_longer(longer_than: int):
    """Against drawing from the whole distribution and throwing away what is too short."""
    rng = np.random.default_rng(longer_than)
    mean, sigma = 100.0, 0.7
    lengths = LengthDistribution(mean, sigma)
    drawn = np.array([lengths.draw(u, longer_than) for u in rng.random(4000)])
    whole = np.ceil(np.exp(np.log(mean) - sigma**2 / 2 + sigma * rng.standard_normal(400_000)))
    kept = whole[whole > longer_than]
    assert drawn.min() > longer_than
    for level in (0.1, 0.5, 0.9):
        quantile = np.quantile(kept, level)
        share = (drawn <= quantile).mean()
        assert abs(share - (kept <= quantile).mean()) < 4 * 0.5 / np.sqrt(4000)
    assert lengths.draw(0.0, longer_than) > longer_than
    assert np.isfinite(lengths.draw(1 - 2.0**-53, 10**6))


def test_trees_decode_at_most_078_of_what_independent_rollouts_do():
    """w = 16, N = 2, segments of 512, mean length 1.5k, cap 7k."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "rollout.py"),
        "tree-tokens",
        "--queries",
        "1500",
        "--json",
    ]
    command += ["--seed", "3", "--width", "16", "--branching-factor", "2", "--segment-length", "512"]
    command += ["--mean-length", "1500", "--max-length", "7168"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    row = json.loads(run.stdout.strip().splitlines()[-1])["rows"][0]
    assert row["decoded_tokens_ratio"] <= 0.78
    assert row["leaves"] == 1500 * 16
    assert abs(row["mean_length"] - 1500) < 100
    # Plain leaves are too long, weighted ones are not.
    assert row["mean_leaf_length"] > 1.3 * row["mean_length"]
    assert abs(row["weighted_leaf_length"] - row["mean_length"]) < 0.03 * row["mean_length"]
