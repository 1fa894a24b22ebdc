"""Advantage estimators on sampled trees against plain loops over leaves, the worked example, and leaf weights."""

import itertools
import statistics
from dataclasses import replace

import numpy as np
import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.config.objective import ADVANTAGE_ESTIMATORS
from megatron_dta.core.objectives.advantages import estimate_advantages, sequence_weights
from megatron_dta.core.objectives.weights import count_trained, loss_weights
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.core.rollouts.paths import decoded_tokens, tree_paths
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_length
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.records import tree_rollouts
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.tree import SampledTree
from recording_engine import RecordingEngine


def leaf(branches: list[int], reward: float, **fields) -> Rollout:
    """One token a node."""
    depth = len(branches)
    return Rollout(
        token_ids=np.arange(1, depth + 2),
        loss_mask=np.arange(depth + 1) > 0,
        reward=reward,
        segment_ends=np.arange(1, depth + 2),
        branches=[0, *branches],
        **fields,
    )


def sampled(seed: int, groups: int = 4, **changes) -> tuple[list[SampledTree], list[Rollout], list[int]]:
    """Random trees, their rollouts with random rewards from a few values, and the tree of each rollout."""
    rng = np.random.default_rng(seed)
    settings = TreeSettings(
        **({"width": 9, "max_response_tokens": 12, "segment_tokens": 3, "initial_branches": 2} | changes)
    )
    engine = RecordingEngine(40, 0.35, seed=seed)
    queries = [TreeQuery(i, np.arange(1, 3 + i)) for i in range(groups)]
    trees = TreeSampler(engine, settings).sample(queries, SamplingParams(12, 0), seed)
    rollouts, owner = [], []
    for number, tree in enumerate(trees):
        rewards = {leaf: float(rng.choice([0.0, 0.5, 1.0, 0.1])) for leaf in tree.leaves}
        if number == 0:
            rewards = dict.fromkeys(rewards, 0.3)
        rollouts += tree_rollouts(tree, f"g{number}", rewards)
        owner += [number] * len(rewards)
    return trees, rollouts, owner


def objective(estimator: str, **settings) -> ObjectiveConfig:
    return ObjectiveConfig(advantage_estimator=estimator, **({"advantage_whitening": "none"} | settings))


def test_worked_example():
    """q -> {a, b}, a -> {a1, a2}, b a leaf; rewards 1, 0, 0; the depth-1 group of b has one leaf."""
    rollouts = [leaf([0, 0], 1.0), leaf([0, 1], 0.0), leaf([1], 0.0)]
    advantages = estimate_advantages(rollouts, objective("treepo"))
    for values, expected in zip(advantages, (7 / 12, -5 / 12, -1 / 3), strict=True):
        np.testing.assert_allclose(values, expected, rtol=1e-6)
    # Per segment: a is judged by its mean 1/2 against 1/3; its leaves as above.
    first, second, third = estimate_advantages(rollouts, objective("treepo_segment"))
    np.testing.assert_allclose(first[1:], [1 / 6, 7 / 12], rtol=1e-6)
    np.testing.assert_allclose(second[1:], [1 / 6, -5 / 12], rtol=1e-6)
    np.testing.assert_allclose(third[1:], [-1 / 3], rtol=1e-6)
    # Leaf weights 1/4, 1/4, 1/2: the value of the root is the mean of its children, 1/4.
    weighted = [replace(r, leaf_weight=w) for r, w in zip(rollouts, (0.25, 0.25, 0.5), strict=True)]
    first, second, third = estimate_advantages(weighted, objective("treepo_segment", leaf_weights="advantages"))
    np.testing.assert_allclose(first[1:], [1 / 4, (3 / 4 + 1 / 2) / 2], rtol=1e-6)
    np.testing.assert_allclose(third[1:], [-1 / 4], rtol=1e-6)


def slow_treepo(rollouts, weights, i, upto, value, config) -> float:
    """Mean gap to the levels above node ``upto`` of rollout i, leaves found by comparing their branches."""
    options = config.treepo_advantages or []
    rollout, gaps, sizes = rollouts[i], [], []
    for depth in range(upto):
        members = [
            k
            for k, other in enumerate(rollouts)
            if other.group_id == rollout.group_id
            and other.branches[: depth + 1].tolist() == rollout.branches[: depth + 1].tolist()
        ]
        rewards = [rollouts[k].reward for k in members]
        if depth == 0 and "drop-root" in options:
            continue
        if depth > 0 and (len(members) == 1 or ("reject-zero-variance" in options and len(set(rewards)) == 1)):
            continue
        gaps.append(value - slow_mean(rollouts, weights, members))
        sizes.append(len(members))
    if not gaps:
        return 0.0
    return (
        sum(g * s for g, s in zip(gaps, sizes, strict=True)) / sum(sizes)
        if "size-weighted" in options
        else statistics.fmean(gaps)
    )


def slow_mean(rollouts, weights, members) -> float:
    total = sum(weights[k] for k in members)
    if total == 0:
        return statistics.fmean(rollouts[k].reward for k in members)
    return sum(weights[k] * rollouts[k].reward for k in members) / total


OPTIONS = [
    {},
    {"treepo_advantages": ["size-weighted"]},
    {"treepo_advantages": ["drop-root"]},
    {"treepo_advantages": ["reject-zero-variance"]},
    {"treepo_advantages": ["size-weighted", "drop-root", "reject-zero-variance"]},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("seed", "weighted"), [(0, False), (1, True)])
def test_tree_estimators_equal_loops_over_leaves(seed: int, weighted: bool, options: dict):
    _, rollouts, _ = sampled(seed)
    assert any(rollout.fallback for rollout in rollouts)
    config = objective("treepo", leaf_weights="advantages" if weighted else "none", **options)
    weights = [rollout.leaf_weight if weighted else 1.0 for rollout in rollouts]
    advantages = estimate_advantages(rollouts, config)
    segments = estimate_advantages(rollouts, replace(config, advantage_estimator="treepo_segment"))
    for i, rollout in enumerate(rollouts):
        expected = slow_treepo(rollouts, weights, i, len(rollout.branches) - 1, rollout.reward, config)
        np.testing.assert_allclose(advantages[i], expected, rtol=0, atol=1e-6)
        for depth in range(1, len(rollout.branches)):
            path = rollout.branches[: depth + 1].tolist()
            below = [
                k
                for k, other in enumerate(rollouts)
                if other.group_id == rollout.group_id and other.branches[: depth + 1].tolist() == path
            ]
            value = slow_mean(rollouts, weights, below)
            span = slice(rollout.segment_ends[depth - 1], rollout.segment_ends[depth])
            expected = slow_treepo(rollouts, weights, i, depth, value, config)
            np.testing.assert_allclose(segments[i][span], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("seed", "weighted"), [(0, False), (1, True)])
def test_group_estimators_equal_loops(seed: int, weighted: bool):
    _, rollouts, owner = sampled(seed)
    leaf_weights = "advantages" if weighted else "none"
    advantages = {
        name: [
            float(values[-1]) for values in estimate_advantages(rollouts, objective(name, leaf_weights=leaf_weights))
        ]
        for name in ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    }
    for i, rollout in enumerate(rollouts):
        members = [k for k in range(len(rollouts)) if owner[k] == owner[i]]
        weight = {k: rollouts[k].leaf_weight if weighted else 1 / len(members) for k in members}
        mean = sum(weight[k] * rollouts[k].reward for k in members)
        gap = rollout.reward - mean
        assert advantages["reinforce_plus_plus"][i] == np.float32(rollout.reward)
        for name in ("dr_grpo", "reinforce_plus_plus_baseline"):
            assert abs(advantages[name][i] - gap) < 1e-6
        variance = sum(weight[k] * (rollouts[k].reward - mean) ** 2 for k in members)
        variance /= 1 - sum(value**2 for value in weight.values())
        assert abs(advantages["grpo"][i] - (gap / (variance**0.5 + 1e-6) if variance > 1e-12 else 0)) < 1e-5
        others = sum(weight[k] * rollouts[k].reward for k in members if k != i) / (1 - weight[i])
        assert abs(advantages["rloo"][i] - (rollout.reward - others)) < 1e-6


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@pytest.mark.parametrize("weighted", [False, True])
def test_whitening(name: str, weighted: bool):
    """Mean 0 and sample variance 1 over trained tokens, groups without spread left at 0; the default of some."""
    _, rollouts, owner = sampled(5)
    plain = objective(name, leaf_weights="both" if weighted else "none")
    white = estimate_advantages(rollouts, replace(plain, advantage_whitening="token"))
    plain_values = estimate_advantages(rollouts, plain)
    chosen = [i for i in range(len(rollouts)) if owner[i] != 0 or name == "reinforce_plus_plus"]
    scale = sequence_weights(rollouts, "both" if weighted else "none")
    values = np.concatenate([white[i][rollouts[i].loss_mask] for i in chosen])
    weights = np.concatenate([np.full(np.count_nonzero(rollouts[i].loss_mask), scale[i]) for i in chosen])
    assert abs(np.average(values, weights=weights)) < 1e-5
    freedom = 1 - np.sum((weights / weights.sum()) ** 2)
    assert abs(np.average(values**2, weights=weights) / freedom - 1) < 1e-5
    before = np.concatenate([plain_values[i][rollouts[i].loss_mask] for i in chosen])
    slope, offset = np.polyfit(before, values, 1)
    np.testing.assert_allclose(slope * before + offset, values, atol=1e-4)
    if name != "reinforce_plus_plus":
        assert all((white[i] == 0).all() for i in range(len(rollouts)) if owner[i] == 0)
    default = estimate_advantages(rollouts, replace(plain, advantage_whitening=None))
    expected = white if name in ADVANTAGE_ESTIMATORS[3:] else plain_values
    for a, b in zip(default, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rewards_of_turns():
    """REINFORCE++ credits a turn with what comes from it on."""
    rollout = replace(leaf([0, 0, 1], 2.5), segment_rewards=[0.0, 1.0, 0.5, 1.0])
    values = estimate_advantages([rollout], objective("reinforce_plus_plus"))[0]
    assert values[1:].tolist() == [2.5, 1.5, 1.0]


@pytest.mark.parametrize("seed", range(2))
def test_leaf_weights_in_the_loss(seed: int):
    """The weighted token mean, by a loop; weights keep the scale: they sum to the trajectories of each group."""
    rng = np.random.default_rng(seed)
    _, rollouts, owner = sampled(seed)
    weights = sequence_weights(rollouts, "loss")
    for number in set(owner):
        members = [i for i in range(len(owner)) if owner[i] == number]
        np.testing.assert_allclose(weights[members], [rollouts[i].leaf_weight * len(members) for i in members])
    trained = np.array([np.count_nonzero(rollout.loss_mask) for rollout in rollouts])
    losses = [rng.normal(size=count) for count in trained]
    for mode in ("token-mean", "sequence-mean"):
        if mode == "token-mean":
            expected = sum(w * loss.sum() for w, loss in zip(weights, losses, strict=True)) / (weights * trained).sum()
        else:
            expected = sum(w * loss.mean() for w, loss in zip(weights, losses, strict=True)) / weights.sum()
        half = len(rollouts) // 2
        counts = count_trained(trained[:half], weights[:half]) + count_trained(trained[half:], weights[half:])
        for counted in (None, counts):
            factors = loss_weights(trained, mode, counted, weights)
            assert abs(sum(f * loss.sum() for f, loss in zip(factors, losses, strict=True)) - expected) < 1e-12
    np.testing.assert_array_equal(sequence_weights(rollouts, "advantages"), 1)
    with pytest.raises(InputError, match="weights are all 0"):
        sequence_weights([replace(r, leaf_weight=0.0) for r in rollouts], "loss")


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_keep_the_tree(tmp_path, suffix: str):
    trees, rollouts, owner = sampled(8)
    assert decoded_tokens(rollouts) == sum(tree.decoded_tokens for tree in trees)
    path = tmp_path / f"rollouts{suffix}"
    write_rollouts(path, rollouts)
    again = load_rollouts(path)
    for name in ("treepo", "treepo_segment"):
        before, after = (estimate_advantages(r, objective(name, leaf_weights="both")) for r in (rollouts, again))
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)
    paths = tree_paths(again)
    assert paths.num_nodes == sum(len(tree.nodes) for tree in trees)
    for rollout, tree in zip(again, (trees[i] for i in owner), strict=True):
        node = next(n for n in tree.nodes if n.path == tuple(rollout.branches[1:]))
        assert rollout.segment_ends[-1] == node.length == len(rollout)
    short = cut_length(again[0], again[0].segment_ends[0] + 1)
    assert short.segment_ends.tolist() == [again[0].segment_ends[0], len(short)]
    assert short.branches.tolist() == again[0].branches[:2].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leaf_weight": 1.5}, "leaf_weight.*not between"),
        ({"branches": None}, "branches.*missing, although segment_ends"),
        ({"segment_ends": [1, 1, 3]}, "segment_ends.*must rise"),
        ({"branches": [1, 0, 0]}, "branches.*begin with 0"),
        ({"segment_rewards": [1.0] * 3, "segment_ends": None, "branches": None}, "without segment_ends"),
    ],
)
def test_bad_tree_fields_are_refused(changes: dict, message: str):
    with pytest.raises(InputError, match=message):
        replace(leaf([0, 1], 1.0), **changes)


def test_fallback_weights():
    trees, _, _ = sampled(8)
    tree = next(t for t in trees if any(t.nodes[i].fallback for i in t.leaves))
    for index, weight in tree.leaf_weights().items():
        assert (weight == 0) == tree.nodes[index].fallback


def test_rows_that_disagree_about_a_node_are_refused(tmp_path):
    """Otherwise the trainer, which takes the stored tree for granted, would train other tokens than are stored."""
    _, rollouts, _ = sampled(8)
    path = tmp_path / "bad.jsonl"
    wide = next(
        i
        for i, (first, second) in enumerate(itertools.pairwise(rollouts))
        if first.group_id == second.group_id
        and min(len(first.branches), len(second.branches)) > 2
        and first.branches[:2].tolist() == second.branches[:2].tolist()
    )
    bad = list(rollouts)
    tokens = rollouts[wide + 1].token_ids.copy()
    tokens[rollouts[wide + 1].segment_ends[0]] += 1
    bad[wide + 1] = replace(rollouts[wide + 1], token_ids=tokens)
    write_rollouts(path, bad)
    with pytest.raises(InputError, match=rf"row {wide + 2}: field 'branches': node 1 has other tokens than in row"):
        load_rollouts(path)
    # Cut rollouts name their last node's beginning: that is fine.
    cut = [short for r in rollouts if (short := cut_length(r, int(r.segment_ends[0]) + 2)) is not None]
    write_rollouts(path, [*rollouts, *(replace(r, trajectory_id=f"cut {i}") for i, r in enumerate(cut))])
    assert len(load_rollouts(path)) == len(rollouts) + len(cut)
