"""The rollout benchmark's parts on speculation: forced samples are the record's, and the figures fit together."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.rollouts import Rollout, write_rollouts
from megatron_dta.sampling.engines.interface import GenerationRequest, generate
from rollout_forest import NEVER
from sampling_cases import VOCAB, make_model, random_prompts
from test_benchmark_rollout import run
from test_speculation_exact import suffix_drafting

sys.path.insert(0, str(REPOSITORY / "tools"))
from forced_engine import ForcedEngine


def write_repetitive(path: Path, generator: np.random.Generator, turns: int = 1) -> int:
    """Four samples of each of three prompts, the same but for two tokens; returns the most tokens of one."""
    rollouts, longest = [], 0
    for problem in range(3):
        prompt, base = generator.integers(0, 4096, 9), generator.integers(0, 4096, 40)
        for _ in range(4):
            generated = base[: generator.integers(12, 40)].copy()
            generated[generator.integers(0, len(generated), 2)] = generator.integers(0, 4096, 2)
            ids = np.concatenate([prompt, generated]).astype(np.int32)
            mask = np.arange(len(ids)) >= 9
            if turns > 1:
                mask[14] = False
            rollouts.append(Rollout(ids, mask, reward=0.0, group_id=str(problem)))
            longest = max(longest, len(generated))
    write_rollouts(path, rollouts)
    return longest


@pytest.mark.parametrize("drafts", [False, True])
def test_a_forced_engine_gives_the_record(drafts: bool):
    generator = seed_all(3)
    model = make_model(3)
    recorded = {i: generator.integers(0, VOCAB, 30).astype(np.int32) for i in range(5)}
    recorded[4] = recorded[0]
    prompts = random_prompts(generator, [3, 8, 5, 4, 3])
    engine = ForcedEngine(recorded, model)
    for step in range(3):
        engine.draft_with(suffix_drafting(budget="always") if drafts and step else None)
        engine.start(NEVER, step)
        results = generate(engine, [GenerationRequest(i, p, 30 - i, i) for i, p in enumerate(prompts)])
        assert all(np.array_equal(r.token_ids, recorded[i][: 30 - i]) for i, r in enumerate(results))
    assert (engine.statistics()["drafted_tokens"] > 0) == drafts


def test_das_reports_makespans_that_fit_together(tmp_path: Path):
    rollouts = tmp_path / "rollouts.jsonl"
    write_repetitive(rollouts, seed_all(1))
    flags = "--past 2 --batch 4 --runs 1 --waves 2 --memory-bandwidth-gbs 10 --das-budget always --json"
    result = run("das", "--rollouts", str(rollouts), *flags.split())
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert row["samples"] == 6
    assert row["waves"] == 2
    assert row["saved"] == pytest.approx(1 - row["das_seconds"] / row["plain_seconds"])
    assert row["predicted_saved"] == pytest.approx(1 - row["predicted_das_seconds"] / row["predicted_plain_seconds"])
    assert row["das_forwards"] < row["plain_forwards"]
    assert row["accepted_tokens"] > 20
    # The first token of a sample comes with its prompt, which the replay does not know of.
    assert row["tokens_per_forward"] == pytest.approx(row["predicted_tokens_per_forward"], rel=0.15)


def test_noise_is_none_for_the_same_run_again():
    flags = "--batch 4 --response-tokens 12 --prompt-tokens 9 --memory-bandwidth-gbs 10 --json"
    result = run("das-noise", *flags.split())
    assert result.returncode == 0, result.stderr
    rows = {row["run"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    assert rows.keys() == {"the same again", "another batch size", "drafts"}
    assert rows["the same again"]["kl"] == rows["the same again"]["flips_per_thousand"] == 0
    # float32: rounding is there, and far too small for a flip in so few tokens.
    assert rows["drafts"]["kl"] < 1e-8
    assert all(row["compared_tokens"] == 48 for row in rows.values())


def test_what_cannot_be_measured_is_refused(tmp_path: Path):
    rollouts = tmp_path / "turns.jsonl"
    write_repetitive(rollouts, seed_all(2), turns=2)
    for flags, words in (
        ("--batch 4", "several turns"),
        ("--batch 4 --live-batch 5", "--live-batch must be from 1 to --batch 4"),
    ):
        result = run("das", "--rollouts", str(rollouts), "--memory-bandwidth-gbs", "10", *flags.split())
        assert result.returncode == 2
        assert words in result.stderr
        assert "Traceback" not in result.stderr
