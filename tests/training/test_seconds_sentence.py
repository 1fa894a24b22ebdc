"""The line at the end of a run: where the seconds went, and what to change first."""

import pytest

from megatron_dta.training.monitor.seconds import seconds_sentence, start_sentence


def steps(**seconds: float) -> list[dict]:
    """Records of a run whose first two steps took longer."""
    timing = {"step_seconds": 1.0, "collect_seconds": 0.5, "sampling_seconds": 0.46, "train_seconds": 0.3} | seconds
    first = timing | {"step_seconds": 9.0, "train_seconds": 8.0}
    return [{"timing": {}}, *[{"timing": first}] * 2, *[{"timing": timing}] * 3]


def test_shares_of_a_step() -> None:
    sentence = seconds_sentence(steps(plan_seconds=0.02, update_seconds=0.001))
    parts = "sampling 46%, training 30%, other 18%, prompts and rewards 4%, trees and plans 2%"
    assert sentence.startswith(
        f"Time: a step took 1 s: {parts}. First to change (0.46 s a step): sampling, the longest"
    )
    assert seconds_sentence([{"timing": {}}, {}]) is None


@pytest.mark.parametrize(
    ("seconds", "change"),
    [
        (dict(sampling_waiting_seconds=0.3, sampling_tail_seconds=0.2), "--inference-max-requests"),
        (dict(sampling_waiting_seconds=0.1, sampling_tail_seconds=0.2), "--rollout-speculation das"),
        (dict(sampling_seconds=0.2, sampling_tail_seconds=0.2), "a faster reward"),
        (dict(train_seconds=0.4, rank_balance=0.6), "the slowest;"),
        (dict(plan_seconds=0.15), "--tree-segment-tokens"),
        (dict(sampling_tail_seconds=0.05), "sampling, the longest phase"),
    ],
)
def test_the_first_thing_to_change_is_where_most_seconds_are(seconds: dict[str, float], change: str) -> None:
    assert change in seconds_sentence(steps(**seconds)).partition("First to change")[2]
    assert "das" not in seconds_sentence(steps(**seconds, speculation_saved_seconds=0.1))  # it has drafts already


def test_the_start_is_told_by_parts():
    parts = {"imports": 6.04, "data": 0.01, "first step": 3.0}
    sentence = start_sentence(parts, {"collect_seconds": 2.5, "train_seconds": 0.4})
    assert sentence == ("Start: first step done after 9.1 s: imports 6.0, first step 3.0 (sampling 2.5, training 0.4)")
    assert start_sentence({"imports": 1.0}, {}).endswith(": imports 1.0")
