"""``benchmarks/replay_das.py`` as a user runs it, and the replay against plain loops."""

from pathlib import Path

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.speculator import Speculator
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from rollout_parts.das_replay import plain_makespan, recorded_samples, remember, replay_wave, split_history
from speculation_exact_cases import clockless
from tool_runs import Tool

TOOL = Tool("replay_das", "benchmarks")


def small_rollouts(seed: int, turns: bool = True) -> list[Rollout]:
    """Problems with samples that share much, in one or several turns."""
    rng = seed_all(seed)
    rollouts = []
    for problem in range(7):
        prompt, text = rng.integers(0, 50, 6), rng.integers(0, 50, 80)
        for _ in range(int(rng.integers(1, 6))):
            response = np.where(rng.random(80) < 0.9, text, rng.integers(0, 50, 80))[: rng.integers(5, 80)]
            tokens = np.concatenate([prompt, response]).astype(np.int32)
            mask = np.arange(len(tokens)) >= 6
            if turns and len(tokens) > 20:
                mask[12:15] = False
            rollouts.append(Rollout(tokens, mask, reward=0.0, group_id=f"p{problem}"))
    return rollouts


@pytest.mark.parametrize("budget", ["straggler", "class"])
def test_replay_by_loops(budget: str) -> None:
    """Live batches, tokens and seconds of each forward; what was accepted is what was drafted."""
    rollouts = small_rollouts(1)
    history, now = split_history(recorded_samples(rollouts), 2)
    assert sum(map(len, history)) + len(now) == len(rollouts)
    cost = ForwardCost(8e-3, 1e-4, 3.0, 1e-6)
    speculator = Speculator(DrafterParams(depth=12, draft=DraftParams(width=7)), clockless(cost), budget)
    remember(speculator, history)
    made, record = [], speculator.record

    def spying_record(proposal, accepted, tokens, offsets, seconds):
        count = len(proposal.slots) + int(proposal.lengths.sum())
        assert seconds == pytest.approx(float(cost.seconds(count)) + 1e-6 * len(proposal.asked))
        for i in range(len(proposal.slots)):
            draft, right = proposal.tokens[i, : accepted[i]].tolist(), tokens[offsets[i] : offsets[i + 1]].tolist()
            assert right[: len(draft)] == draft
        made.append((len(proposal.slots), len(tokens), seconds))
        record(proposal, accepted, tokens, offsets, seconds)

    speculator.record = spying_record
    report = replay_wave(speculator, now, 2)
    live, tokens, seconds = zip(*made, strict=True)
    assert (report.live, sum(report.steps)) == (list(live), sum(live))
    assert sum(tokens) == sum(len(sample.generated) for sample in now)
    assert report.makespan == pytest.approx(sum(seconds))
    assert report.tokens_per_forward > 1.3
    longest = max(len(sample.generated) for sample in now)
    assert longest > len(report.live)
    plain = [float(cost.seconds(sum(len(sample.generated) > i for sample in now))) for i in range(longest)]
    assert plain_makespan(now, cost) == pytest.approx(sum(plain))


def test_small_file(tmp_path: Path) -> None:
    """Keys and their meaning."""
    path = tmp_path / "rollouts.jsonl"
    write_rollouts(path, small_rollouts(3))
    flags = ("--past", 2, "--live-batch", 5)
    values = TOOL.json(path, *flags)
    assert 1 < values["tokens_per_forward"] < 24
    warm = values["warm"]
    assert values["makespan_saved"] == pytest.approx(1 - warm["makespan_seconds"] / warm["plain_makespan_seconds"])
    assert warm["wasted_tokens"] == warm["drafted_tokens"] - warm["accepted_tokens"] > 0
    assert values["makespan_saved"] > values["makespan_saved_cold"] > -0.02


def test_recorded_math() -> None:
    """The figures that the method is expected to reach on the real set."""
    path = rollout_file("math_qwen25_8x100.npz")
    wide = TOOL.json(path, "--stop-degenerate", "--live-batch", 95, "--max-sequences", 200)
    assert wide["tokens_per_forward"] >= 2.4
    assert wide["makespan_saved"] >= 0.40
    assert wide["makespan_saved_cold"] > 0.2
    assert wide["drafter_bytes_per_token"] < 300


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl", small_rollouts(5))
    TOOL.assert_refused(tmp_path / "rollouts.jsonl", "--c-base", "0", parts=("base > 0",))
