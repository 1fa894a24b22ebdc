"""Optimizer steps cut along the tree: against all cuts and the rollout batch's order; in the trainer, with a critic."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import write_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.data.mini_batches import cut_mini_batches
from megatron_dta.training.data.step import split_groups
from mesh_trainer_cases import OWN, SHARDED, train_on_rank
from mesh_worker import run_on_ranks
from partition_cases import WHOLE_COSTS, cost, counts, random_forest, turns_forest
from resume_cases import rows_without_timing
from trainer_cases import VOCABULARY, make_trainer

PPO = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --max-position-embeddings 48 --task arithmetic "
    "--arithmetic-max-operand 29 --rollout-batch-size 6 --n-samples-per-prompt 3 --rollout-max-response-len 6 "
    "--num-steps-per-rollout 3 --old-logprobs recompute --objective ppo --lr 1e-3 --critic-lr 5e-3 "
    "--seed 11"
)


def by_appearance(names: list[str], steps: int) -> list[set[str]]:
    """The groups of each step, cut in the rollout batch's own order."""
    line = list(dict.fromkeys(names))
    return [{line[i] for i in part} for part in np.array_split(np.arange(len(line)), steps)]


@pytest.mark.parametrize("seed", range(3))
def test_cuts_separate_least(seed: int) -> None:
    """Whole groups, as many in each mini-batch; of all runs of groups in order, those that separate least."""
    rng = seed_all(seed)
    sequences, masks, names = turns_forest(rng, 9, 3, 3)
    order = rng.permutation(len(names))
    samples = [TrainingSample(sequences[i], masks[i]) for i in order]
    names = [names[i] for i in order]

    def rows(part: set[str]) -> tuple[list, list]:
        chosen = [i for i, name in enumerate(names) if name in part]
        return [samples[i].token_ids for i in chosen], [samples[i].loss_mask for i in chosen]

    line = [name for _, name in sorted((min(samples[i].token_ids[:60].tobytes() for i in range(len(names))
                                            if names[i] == name), name) for name in set(names))]  # fmt: skip
    for steps in (1, 2, 4, 9):
        mini_batches = cut_mini_batches(samples, steps, names, WHOLE_COSTS)
        batches = [batch.tolist() for batch in mini_batches.samples]
        assert sorted(itertools.chain(*batches)) == list(range(len(samples)))
        assert batches == sorted(map(sorted, batches))
        groups = [{names[i] for i in batch} for batch in batches]
        assert sum(map(len, groups)) == 9
        assert {len(group) for group in groups} <= {9 // steps, -(-9 // steps)}

        sizes = [9 // steps + extra for extra in [1] * (9 % steps) + [0] * (steps - 9 % steps)]
        every = [by_appearance(names, steps)] + [
            [set(line[sum(size[:k]) : sum(size[: k + 1])]) for k in range(steps)]
            for size in (set(itertools.permutations(sizes)) if steps < 9 else [sizes])
        ]
        totals = [sum(cost(WHOLE_COSTS, *rows(part)) for part in parts) for parts in every]
        assert sum(cost(WHOLE_COSTS, *rows(part)) for part in groups) == min(totals)
        once = counts(*rows(set(names)))[0]
        assert mini_batches.separated_tokens == sum(counts(*rows(part))[0] for part in groups) - once
    for steps in (0, 10):
        with pytest.raises(ValueError, match=f"cannot be cut into {steps}"):
            cut_mini_batches(samples, steps, names)
    with pytest.raises(ValueError, match="2 names of groups"):
        cut_mini_batches(samples, 2, names[:2])


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_share_no_prefix_stay_whole(seed: int) -> None:
    rng = seed_all(seed)
    samples = [TrainingSample(*pair) for pair in zip(*random_forest(rng, 50), strict=True) if pair[1].any()]
    names = [f"{rng.integers(0, 9)}" for _ in samples]
    trained = trained_parts(samples)
    for steps in (1, 2, 5):
        cut = cut_mini_batches(samples, steps, names, WHOLE_COSTS)
        assert len({(names[i], step) for step, batch in enumerate(cut.samples) for i in batch}) == len(set(names))
        tokens = [counts(*([part[i] for i in batch] for part in trained))[0] for batch in cut.samples]
        assert cut.separated_tokens == sum(tokens) - counts(*trained)[0]


def families(rng: np.random.Generator, count: int, groups: int, per_group: int) -> list[Rollout]:
    """Groups of rollouts whose prompts continue one of ``count`` contexts, in alternation."""
    contexts = [np.append(family, rng.integers(0, VOCABULARY, 12)) for family in range(count)]
    rollouts = []
    for group in range(groups):
        prompt = np.append(contexts[group % count], rng.integers(0, VOCABULARY, 3))
        for _ in range(per_group):
            tokens = np.append(prompt, rng.integers(0, VOCABULARY, rng.integers(1, 9))).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            rollouts.append(Rollout(tokens, mask, reward=float(rng.standard_normal()), group_id=f"g{group}"))
    return rollouts


@pytest.mark.parametrize("seed", range(2))
def test_steps_of_the_trainer_follow_the_tree(seed: int) -> None:
    rng = seed_all(seed)
    rollouts = families(rng, 3, 9, 2)
    names = [rollout.group_id for rollout in rollouts]
    steps, told = split_groups(rollouts, 3)
    assert [{names[i] for i in step} for step in steps] == [{f"g{i}" for i in range(k, 9, 3)} for k in range(3)]
    assert told == {"separated_tokens": 0.0}
    # A rollout batch in another order is cut into the same steps.
    order = rng.permutation(len(rollouts))
    again, _ = split_groups([rollouts[i] for i in order], 3)
    assert {frozenset(order[step].tolist()) for step in again} == {frozenset(step) for step in steps}
    # One step keeps the order of the rollout batch; so do groups that share nothing or the same.
    assert split_groups(rollouts, 1) == ([list(range(len(rollouts)))], {})
    unlike = families(rng, 9, 9, 2)
    assert split_groups(unlike, 3)[0] == [list(part) for part in np.array_split(np.arange(18), 3)]
    alike = [Rollout(np.append(1, r.token_ids), np.append(False, r.loss_mask), group_id=r.group_id) for r in unlike]
    with pytest.raises(InputError, match="--num-steps-per-rollout 10"):
        split_groups(alike, 10)
    steps, told = split_groups(alike, 3)
    assert (steps, told) == ([list(part) for part in np.array_split(np.arange(18), 3)], {"separated_tokens": 2.0})


def test_what_a_collection_is_told_does_not_depend_on_its_cut(tmp_path: Path) -> None:
    """Passes and advantages are of the weights before the first step, whichever step a rollout is in."""
    rollouts = families(seed_all(7), 2, 6, 3)
    write_rollouts(tmp_path / "r.jsonl", rollouts)
    trainer, _ = make_trainer(
        f"--rollouts {tmp_path}/r.jsonl --global-batch-size 18 --objective ppo --old-logprobs recompute --kl-coef 0.1"
    )
    (whole,) = trainer.preparation.prepare(rollouts)
    assert "separated_tokens" not in whole.statistics
    trainer.preparation.num_steps = 2
    parts = trainer.preparation.prepare(rollouts)
    assert [{rollout.group_id for rollout in step.rollouts} for step in parts] == [
        {"g0", "g2", "g4"},
        {"g1", "g3", "g5"},
    ]
    assert [step.statistics["separated_tokens"] for step in parts] == [0.0, 0.0]
    of_rollout = {id(rollout): sample for rollout, sample in zip(whole.rollouts, whole.samples, strict=True)}
    for step in parts:
        for rollout, sample in zip(step.rollouts, step.samples, strict=True):
            expected = of_rollout[id(rollout)]
            for name in ("old_logprobs", "old_values", "advantages", "returns"):
                np.testing.assert_allclose(getattr(sample, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds what runs with a critic, three steps a rollout batch, have left behind on one and on two processes."""
    path = tmp_path_factory.mktemp("runs")

    def job(name: str, flags: str = "", iters: int = 5) -> tuple[str, None]:
        return f"{PPO} {flags} --train-iters {iters} --save {path}/{name}", None

    # Stopped within the first rollout batch and within the second one.
    cut = [job("two-cut", SHARDED, iters) for iters in (2, 4, 5)]
    for jobs, world_size in (([job("one")], 1), ([job("two", SHARDED), *cut], 2)):
        run_on_ranks(train_on_rank, jobs, world_size, path / f"ranks-{world_size}")
    return path


def test_ranks_cut_alike(folder: Path) -> None:
    expected, resumed = rows_without_timing(folder / "one"), rows_without_timing(folder / "two")
    assert len(resumed) == 5
    for left, right in zip(expected, resumed, strict=True):
        assert left.keys() == right.keys()
        assert left["separated_tokens"] > 0
        for key in left.keys() - OWN:
            assert right[key] == pytest.approx(left[key], rel=2e-3, abs=2e-5), key


def test_a_run_stopped_within_a_collection_goes_on_bit_for_bit(folder: Path) -> None:
    assert rows_without_timing(folder / "two-cut") == rows_without_timing(folder / "two")
