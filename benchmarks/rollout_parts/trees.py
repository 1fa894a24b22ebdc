"""The parts ``tree`` and ``tree-tokens`` of the rollout benchmark: trees against equally many independent rollouts.

Lengths come from ``simulated_lengths``, since a model with random weights has no meaningful lengths.

The gain of trees depends on the number of trajectories per row of a pass (--queries x --width / --batch). If all
trajectories fit at once, both methods take as long as their longest path. With several times as many trajectories as
rows, as in training, the rows are full until the end, and the number of decoded tokens and their contexts determine the
time. Leaves of trees are longer than independent rollouts, because long paths branch more often;
``leaf_tokens_per_second`` takes this into account.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np

from common.bandwidth import synchronize
from common.engine import Setup, build_engine, check_arguments, counts_since, warm_up
from common.simulated_lengths import LengthDistribution, SimulatedLengths
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.interface import RolloutEngine
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.tree import SampledTree

_COUNTS = ("decoded_tokens", "prefilled_tokens", "reused_tokens", "forwards", "static_forwards", "captures")


def add_tree_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of both parts."""
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="leaves of a query")
    parser.add_argument("--branching-factor", type=int, default=2)
    parser.add_argument("--initial-branches", type=int, default=2)
    parser.add_argument("--initial-branches-max", type=int)
    parser.add_argument("--segment-length", type=int, default=512)
    parser.add_argument("--fallback", choices=("none", "random", "finished"), default="random")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--mean-length", type=float, default=1500.0, help="mean of the lognormal lengths")
    parser.add_argument("--length-sigma", type=float, default=0.7, help="standard deviation of their logarithm")
    parser.add_argument("--max-length", type=int, default=7168, help="longest response")


def run_tree_tokens(arguments: argparse.Namespace, setup: Setup | None) -> list[dict[str, Any]]:
    """One row: token counts of trees and of the same number of independent rollouts; no model."""
    _check(arguments)
    return [{"part": "tree-tokens", **compare_tokens(*_both(arguments, None))}]


def run_tree(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """Two rows, trees and independent rollouts with the in-process engine, and one of their ratios."""
    measured = measure_trees(arguments, setup, _settings(arguments))
    rows = [{"part": "tree", "method": method, **row} for method, (row, _) in measured.items()]
    rows.append({"part": "tree", "method": "ratio", **compare_tokens(*(trees for _, trees in measured.values()))})
    for name in ("trajectories_per_second", "leaf_tokens_per_second"):
        rows[-1][name] = rows[0][name] / rows[1][name]
    return rows


def measure_trees(
    arguments: argparse.Namespace, setup: Setup, methods: Mapping[str, TreeSettings]
) -> dict[str, tuple[dict[str, Any], list[SampledTree]]]:
    """The rates of each method, medians over the runs, and what it samples; the methods take turns."""
    _check(arguments)
    if arguments.prompt_tokens + arguments.max_length > arguments.max_position_embeddings:
        raise InputError(f"--max-position-embeddings {arguments.max_position_embeddings} is too short; raise it")
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    counts: dict[str, dict[str, float]] = {}
    trees: dict[str, list[SampledTree]] = {}
    # One engine for all runs, so that graphs are captured before the measurement.
    engine = build_engine(setup, arguments)
    warm_up(setup, engine, arguments.batch, _sampling(arguments))
    for _ in range(arguments.runs):
        for method, settings in methods.items():
            synchronize(setup.device)
            before = engine.statistics()
            trees[method] = _sample(arguments, settings, engine)
            counts[method] = counts_since(before, engine)
            seconds[method].append(counts[method]["seconds"])
            engine.close()
    rows = {}
    for method, method_trees in trees.items():
        spent, leaves = median(seconds[method]), sum(len(tree.leaves) for tree in method_trees)
        rows[method] = {
            "trajectories_per_second": leaves / spent,
            "decoded_tokens_per_second": counts[method]["decoded_tokens"] / spent,
            "leaf_tokens_per_second": sum(tree.response_length(i) for tree in method_trees for i in tree.leaves)
            / spent,
            **{name: counts[method][name] for name in _COUNTS},
            "pass_ms": 1e3 * spent / counts[method]["forwards"],
            "mean_rows": counts[method]["decoded_tokens"] / counts[method]["forwards"],
            "seconds_of_runs": seconds[method],
        }
    return {method: (row, trees[method]) for method, row in rows.items()}


def compare_tokens(trees: list[SampledTree], independent: list[SampledTree]) -> dict[str, float]:
    """Ratios of trees to independent rollouts of the same number of leaves."""
    leaf_lengths = [[tree.response_length(leaf) for leaf in tree.leaves] for tree in trees]
    lengths = [[tree.response_length(leaf) for leaf in tree.leaves] for tree in independent]
    weights = [tree.leaf_weights() for tree in trees]
    decoded, alone = (sum(tree.decoded_tokens for tree in group) for group in (trees, independent))
    weighted = [
        sum(tree.response_length(i) * w for i, w in ws.items()) for tree, ws in zip(trees, weights, strict=True)
    ]
    leaves = sum(map(len, leaf_lengths))
    return {
        "decoded_tokens_ratio": decoded / alone,
        "leaf_tokens_ratio": sum(map(sum, leaf_lengths)) / sum(map(sum, lengths)),
        "longest_path_ratio": sum(map(max, leaf_lengths)) / sum(map(max, lengths)),
        "mean_length": float(np.mean(np.concatenate(lengths))),
        "mean_leaf_length": float(np.mean(np.concatenate(leaf_lengths))),
        "weighted_leaf_length": float(np.mean(weighted)),
        "fallback_share": sum(tree.nodes[i].fallback for tree in trees for i in tree.leaves) / leaves,
        "effective_leaves": float(np.mean([1 / sum(w * w for w in ws.values()) for ws in weights])),
        "leaves": float(leaves),
    }


def tree_settings(arguments: argparse.Namespace, segment: int) -> TreeSettings:
    """The trees of the flags, with segments of ``segment`` tokens."""
    return TreeSettings(
        arguments.width,
        arguments.max_length,
        segment,
        branching_factor=arguments.branching_factor,
        initial_branches=arguments.initial_branches,
        initial_branches_max=arguments.initial_branches_max,
        fallback=arguments.fallback,
    )


def _settings(arguments: argparse.Namespace) -> dict[str, TreeSettings]:
    alone = TreeSettings.independent(arguments.width, arguments.max_length)
    return {"tree": tree_settings(arguments, arguments.segment_length), "independent": alone}


def _both(arguments: argparse.Namespace, inner: RolloutEngine | None) -> tuple[list[SampledTree], list[SampledTree]]:
    trees, independent = (_sample(arguments, settings, inner) for settings in _settings(arguments).values())
    return trees, independent


def _sample(arguments: argparse.Namespace, settings: TreeSettings, inner: RolloutEngine | None) -> list[SampledTree]:
    rng = np.random.default_rng(arguments.seed)
    lengths = LengthDistribution(arguments.mean_length, arguments.length_sigma)
    engine = SimulatedLengths(inner, lengths, arguments.prompt_tokens)
    prompts = rng.integers(0, 1000, (arguments.queries, arguments.prompt_tokens)).astype(np.int32)
    queries = [TreeQuery(i, prompt) for i, prompt in enumerate(prompts)]
    return TreeSampler(engine, settings).sample(queries, _sampling(arguments), 0)


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(arguments.max_length, eos_id=-1, seed=arguments.seed)


def _check(arguments: argparse.Namespace) -> None:
    names = "queries width branching_factor initial_branches segment_length prompt_tokens max_length"
    check_arguments(arguments, *names.split())
    if not arguments.mean_length > 0 or not arguments.length_sigma > 0:
        raise InputError("--mean-length and --length-sigma must be above 0")
