"""Rollout files: exact round trips, both sample granularities against loops, bad records refused with their place."""

import logging
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY, seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.jsonl import write_jsonl
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.core.rollouts.record import Rollout, parts_of
from megatron_dta.core.rollouts.sample_granularity import cut_length, cut_turns
from rollout_cases import GOOD_NPZ, assert_same, check_failed_write, random_rollout

# ---------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("seed", range(2))
def test_round_trip_is_exact(tmp_path: Path, seed: int) -> None:
    rng = seed_all(seed)
    rollouts = [random_rollout(rng) for _ in range(int(rng.integers(1, 700)))]
    path = tmp_path / "r.jsonl"
    write_rollouts(path, rollouts)
    read = load_rollouts(path)
    assert len(read) == len(rollouts)
    for a, b in zip(read, rollouts, strict=True):
        assert_same(a, b)
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "a temporary file was left behind"


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    check_failed_write(tmp_path / "r.jsonl", write_jsonl)


def test_write_refusals(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rollouts to write"):
        write_rollouts(tmp_path / "r.jsonl", [])
    with pytest.raises(InputError, match="cannot be written"):
        write_rollouts(tmp_path / "missing" / "r.jsonl", [random_rollout(seed_all(0))])
    with pytest.raises(InputError, match=r"\.jsonl or \.parquet, not '\.npz'"):
        write_rollouts(tmp_path / "r.npz", [random_rollout(seed_all(0))])


def test_example_file_loads() -> None:
    path = REPOSITORY / "examples" / "rollouts.example.jsonl"
    rollouts = load_rollouts(path, vocab_size=40, require=["reward|advantages"])
    assert len(rollouts) == 4
    assert rollouts[3].advantages.tolist() == [0, 0, 0, 1.5, -0.25]
    turns = load_rollouts(path, sample_granularity="turn")
    assert [len(turn) for turn in turns] == [6, 6, 5, 9, 5]
    assert [turn.trajectory_id for turn in turns] == ["row 1", "row 2", "7+7/0", "7+7/0", "row 4"]


def test_untrained_logprobs_are_dropped_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('\n{"token_ids":[1,2,3],"loss_mask":[0,1,0],"logprobs":[-1,-2,-3]}\n\n{"token_ids":[1],"x":0}')
    with pytest.raises(InputError, match="row 4: field 'x'"):
        load_rollouts(path)
    path.write_text('\n{"token_ids":[1,2,3],"loss_mask":[0,1,0],"logprobs":[-1,-2,-3]}\n\n')
    assert load_rollouts(path)[0].logprobs.tolist() == [0, -2, 0]


# -------------------------------------------------------------------------------------- sample granularity, cutting


def turns_by_loop(rollout: Rollout) -> list[tuple[list[int], list[bool]]]:
    """Plain walk over the mask: tokens up to the end of each run, only that run trained."""
    samples, begin = [], None
    mask = rollout.loss_mask.tolist()
    for i, trained in enumerate([*mask, False]):
        if trained and begin is None:
            begin = i
        if not trained and begin is not None:
            samples.append((rollout.token_ids[:i].tolist(), [begin <= t < i for t in range(i)]))
            begin = None
    return samples


@pytest.mark.parametrize("seed", range(2))
def test_turn_framing_matches_loop(tmp_path: Path, seed: int) -> None:
    rng = seed_all(seed)
    rollouts = [random_rollout(rng) for _ in range(50)]
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    samples = load_rollouts(tmp_path / "r.jsonl", sample_granularity="turn")
    at = 0
    for row, rollout in enumerate(rollouts, start=1):
        for tokens, mask in turns_by_loop(rollout):
            sample = samples[at]
            at += 1
            assert sample.token_ids.tolist() == tokens
            assert sample.loss_mask.tolist() == mask
            for name in ("reward", "group_id", "policy_version"):
                assert getattr(sample, name) == getattr(rollout, name)
            assert sample.trajectory_id == (rollout.trajectory_id or f"row {row}")
            if rollout.advantages is None:
                assert sample.advantages is None
            else:
                np.testing.assert_array_equal(sample.advantages, rollout.advantages[: len(tokens)])
            if rollout.logprobs is not None:
                np.testing.assert_array_equal(sample.logprobs, np.where(mask, rollout.logprobs[: len(tokens)], 0))
    assert at == len(samples)


@pytest.mark.parametrize("sample_granularity", ["trajectory", "turn"])
def test_cutting_and_limits(tmp_path: Path, sample_granularity: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = seed_all(1)
    rollouts = [random_rollout(rng, length) for length in (2, 9, 30, 31, 50, 7)]
    late = np.zeros(40, bool)
    late[35:] = True
    rollouts.insert(1, Rollout(np.arange(40), late))
    path = tmp_path / "r.jsonl"
    write_rollouts(path, rollouts)
    uncut = load_rollouts(path, sample_granularity=sample_granularity)
    expected = [s for s in uncut if s.loss_mask[:30].any()]
    with caplog.at_level(logging.WARNING):
        cut = load_rollouts(path, sample_granularity=sample_granularity, max_length=30)
    assert f"left out {len(uncut) - len(expected)} samples" in caplog.text
    for a, b in zip(cut, expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids[:30])
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask[:30])
        if b.advantages is not None:
            np.testing.assert_array_equal(a.advantages, b.advantages[:30])
    few = load_rollouts(path, sample_granularity=sample_granularity, max_length=30, max_sequences=3)
    for a, b in zip(few, cut[:3], strict=True):
        assert_same(a, b)
    with pytest.raises(InputError, match="tokens; raise that limit"):
        load_rollouts(path, sample_granularity=sample_granularity, max_length=1)
    for limits in ({"max_length": 0}, {"max_sequences": -1}, {"vocab_size": 0}, {"sample_granularity": "step"}):
        with pytest.raises(InputError, match=f"{next(iter(limits))}"):
            load_rollouts(path, **limits)


def test_versions_of_tokens_are_cut_with_them() -> None:
    versions = [-1, 4, 4, -1, 3, 5]
    rollout = Rollout([1, 2, 3, 4, 5, 6], [0, 1, 1, 0, 1, 1], advantages=[0.0] * 6, token_versions=versions)
    cut = cut_length(rollout, 4)
    assert (cut.token_versions.tolist(), cut.policy_version) == (versions[:4], 4)
    turns = cut_turns(rollout, "t")
    assert [(turn.token_versions.tolist(), turn.policy_version) for turn in turns] == [
        ([-1, 4, 4], 4),
        ([-1, -1, -1, -1, 3, 5], 3),
    ]


def test_bad_last_row_stops_a_run_that_would_not_reach_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"token_ids":[1,2],"loss_mask":[0,1]}\n' * 9 + '{"token_ids":[1,-2],"loss_mask":[0,1]}\n')
    with pytest.raises(InputError, match=r"row 10: field 'token_ids': entry 1 is -2, negative"):
        load_rollouts(path, max_sequences=1)


# ---------------------------------------------------------------------------------------------------- real npz data


def test_small_npz(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    np.savez(path, **GOOD_NPZ, extra=np.zeros(3))
    first, second = load_rollouts(path)
    assert_same(first, Rollout([0, 1, 2, 3], [0, 1, 0, 1], 1.0, group_id="x"))
    assert_same(second, Rollout([4, 5, 6], [0, 0, 1], None, group_id="y"))
    touching = {**GOOD_NPZ, "span_beg": np.array([1, 3, 2]), "span_end": np.array([3, 4, 3])}
    np.savez(path, **touching)
    assert [len(sample) for sample in load_rollouts(path, sample_granularity="turn")] == [3, 4, 3]


# ---------------------------------------------------------------------------------------------------- the record itself


def test_record_converts_and_checks() -> None:
    rollout = Rollout([3, 4], [False, True], reward=np.float32(0.5), policy_version=np.int64(3), logprobs=[5e-7, 9e-4])
    assert rollout.token_ids.dtype == np.int32
    assert rollout.loss_mask.dtype == bool
    assert type(rollout.reward) is float
    assert type(rollout.policy_version) is int
    assert len(rollout) == 2
    for bad, reason in (
        ({"token_ids": np.array([[1, 2]])}, "2 dimensions"),
        ({"token_ids": np.array([1.0, 2.0])}, "holds float64, not an integer"),
        ({"loss_mask": np.array(["a", "b"])}, "field 'loss_mask': holds <U1"),
        ({"advantages": np.array([True, False])}, "field 'advantages': holds bool"),
        ({"logprobs": np.array([0.0, np.nan])}, "not finite"),
    ):
        with pytest.raises(InputError, match=reason):
            Rollout(**{"token_ids": [3, 4], "loss_mask": [False, True], **bad})


def test_parts_of_a_rollout_are_what_constructors_make():
    rng = np.random.default_rng(5)
    lengths, prompts = np.array([2, 7, 3, 11]), [1, 4, 2, 3]
    masks = [np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)]
    mask, logprobs = np.concatenate(masks), -rng.random(lengths.sum())
    whole = Rollout(rng.integers(0, 9, lengths.sum()), mask, logprobs=logprobs)
    others = [{"reward": i, "group_id": f"g{i}", "policy_version": np.int64(i), "teacher": None} for i in range(4)]
    others[2]["token_versions"] = [-1, -1, 2]
    others[1].update(segment_ends=[4, 6, 7], branches=[0, 1, 0], segment_rewards=[0, 2, 3], leaf_weight=1)
    others[3] |= {"teacher": "t", "routed_experts": rng.integers(0, 4, 22)}
    begins = (lengths.cumsum() - lengths).tolist()
    for part, begin, length, given in zip(parts_of(whole, lengths, others), begins, lengths, others, strict=True):
        cut = slice(begin, begin + length)
        expected = Rollout(whole.token_ids[cut], mask[cut], logprobs=whole.logprobs[cut], **given)
        assert vars(part).keys() == vars(expected).keys()
        for name, value in vars(expected).items():
            assert type(vars(part)[name]) is type(value), name
            assert np.array_equal(vars(part)[name], value), name
    with pytest.raises(InputError, match="reward"):
        parts_of(whole, lengths, [{"reward": np.nan}] * 4)
    for wrong in ([1, 8, 3, 11], [7, 2, 3, 11], [2, 7, 3, 9]):  # untrained; trained from the first token on; not all
        with pytest.raises(ValueError, match=r"a part must|the parts have"):
            parts_of(whole, np.array(wrong), others)
