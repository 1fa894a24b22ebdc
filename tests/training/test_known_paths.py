"""Forests built from known nodes equal those built from the token lists."""

from dataclasses import fields, replace

import numpy as np
import pytest

from megatron_dta.core.config import ObjectiveConfig, TreeConfig
from megatron_dta.core.engine import prepare_batch
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.rollouts.paths import tree_paths
from megatron_dta.core.rollouts.sample_granularity import cut_length
from megatron_dta.core.tree import build_prefix_tree
from megatron_dta.core.tree.known_paths import KnownPath, build_from_known_paths
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.records import tree_rollouts
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.data.prepare import SamplePreparation
from megatron_dta.training.data.step import known_paths
from recording_engine import RecordingEngine


def random_rollouts(rng: np.random.Generator, vocab: int, count: int = 4, end: float | None = None):
    settings = TreeSettings(
        width=int(rng.integers(1, 12)),
        max_response_tokens=int(rng.integers(2, 30)),
        segment_tokens=int(rng.integers(1, 7)),
        initial_branches=int(rng.integers(1, 5)),
        branching_factor=int(rng.integers(1, 5)),
    )
    engine = RecordingEngine(vocab, float(rng.choice([0.05, 0.3])) if end is None else end, seed=1)
    # Prompts that begin alike, are equal, or are each other's beginning.
    base = rng.integers(1, vocab, 8).astype(np.int32)
    prompts = [
        base[: int(rng.integers(1, 9))] if rng.random() < 0.7 else rng.integers(1, vocab, 3) for _ in range(count)
    ]
    queries = [TreeQuery(i, prompt) for i, prompt in enumerate(prompts)]
    trees = TreeSampler(engine, settings).sample(queries, SamplingParams(40, 0, seed=int(rng.integers(99))), 0)
    return trees, [
        r for i, tree in enumerate(trees) for r in tree_rollouts(tree, str(i), dict.fromkeys(tree.leaves, 1.0))
    ]


def assert_same_forest(actual, expected):
    for field in fields(expected):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.mark.parametrize("seed", range(4))
def test_the_sampled_tree_is_the_trie_of_its_sequences(seed: int):
    """Also of any part of them in any order, cut anywhere, and with tiny vocabularies where branches begin alike."""
    rng = np.random.default_rng(seed)
    for _ in range(25):
        _, rollouts = random_rollouts(rng, int(rng.choice([2, 3, 10, 1000])))
        chosen = [rollouts[i] for i in rng.permutation(len(rollouts))[: int(rng.integers(1, len(rollouts) + 1))]]
        if rng.random() < 0.5:
            chosen = [cut for r in chosen if (cut := cut_length(r, int(rng.integers(3, 25)))) is not None] or rollouts
            chosen += [short for r in chosen if (short := cut_length(r, max(2, len(r) - 2))) is not None]
        sequences = [r.token_ids for r in chosen]
        assert_same_forest(build_from_known_paths(sequences, known_paths(chosen)), build_prefix_tree(sequences))
        if (
            rng.random() < 0.5
        ):  # what the planner does: the paths of whole sequences, tokens cut behind the last trained
            lengths = [int(rng.integers(1, len(s) + 1)) for s in sequences]
            cut = [s[:n] for s, n in zip(sequences, lengths, strict=True)]
            assert_same_forest(build_from_known_paths(cut, known_paths(chosen)), build_prefix_tree(cut))


def test_only_what_is_not_known_is_compared(monkeypatch: pytest.MonkeyPatch):
    """No two siblings begin alike here: the tokens are never sorted."""
    rng = np.random.default_rng(3)
    _, rollouts = random_rollouts(rng, 2**30, count=1, end=0.0)
    sequences, paths = [r.token_ids for r in rollouts], known_paths(rollouts)
    expected = build_prefix_tree(sequences)

    def fail(*_):
        raise AssertionError("sorted")

    monkeypatch.setattr("megatron_dta.core.tree.known_paths.sort_sequences", fail)
    assert_same_forest(build_from_known_paths(sequences, paths), expected)


def test_the_trainer_gets_the_tree():
    """Samples prepared from sampled trees carry it, and their plan is the one that is found without it."""
    rng = np.random.default_rng(5)
    _, rollouts = random_rollouts(rng, 50)
    settings = ObjectiveConfig(advantage_estimator="treepo", leaf_weights="both")
    preparation = SamplePreparation(TrainConfig(model=None, objective=settings), make_objective(settings), None)
    samples = preparation._samples(rollouts)
    assert all(sample.path is not None for sample in samples)
    tree = TreeConfig(tree_segment_tokens=16)
    known = prepare_batch(samples, tree)
    plain = prepare_batch([replace(sample, path=None) for sample in samples], tree)
    assert known.plan.digest(known.plan.training) == plain.plan.digest(plain.plan.training)
    weights = np.array([rollout.leaf_weight for rollout in rollouts])
    total = known.loss_weights.sum()
    assert abs(total - 1) < 1e-12
    first = np.array([known.loss_weights[begin] for begin in known.plan.sequence_pairs[:-1]])
    sizes = np.array([sum(r.group_id == other.group_id for other in rollouts) for r in rollouts])
    np.testing.assert_allclose(first / first.sum(), weights * sizes / (weights * sizes).sum(), rtol=1e-12)


def test_paths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="do not reach"):
        build_from_known_paths([np.arange(3)], [KnownPath(np.array([0]), np.array([2]))])
    with pytest.raises(ValueError, match="1 paths for 2"):
        build_from_known_paths([np.arange(3)] * 2, [KnownPath(np.array([0]), np.array([3]))])
    assert tree_paths([]).num_nodes == 0
