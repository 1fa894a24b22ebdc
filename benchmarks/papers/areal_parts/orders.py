"""Compares orders in which a prefix tree is traversed, and ways to cut it: tokens computed, tokens in flight, seconds.

Random sequences are taken one after the other without a tree: what a sequence shares with the last one stays, the rest
of the last one is dropped, so a prefix that comes back later is computed again. A prefix tree computes every token
once in any order of its children; then the cut decides what is in flight:

    at forks          no segment holds tokens of two branches, so one path is in flight; segments are small (AReaL-DTA)
    every S tokens    a segment begins in one subtree and ends in the next, so the path through segments is long
    planned           the planner orders the children so that full segments leave few tokens in flight
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean

import numpy as np

from common.training_step import StepTimer
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.planning.segments.branches import Branches
from megatron_dta.core.planning.segments.plan import SegmentPlan, plan_segments
from megatron_dta.core.planning.segments.recompute import choose_kept_segments
from megatron_dta.core.tree import PrefixTree, build_prefix_tree
from megatron_dta.core.tree.prefix_tree import as_sequences, build_from_order
from papers.areal_parts.steps import StepSettings, cut_nodes, measure, plan_of_segments
from papers.areal_parts.workload import RolloutSet
from papers.tables import PaperReport

COLUMNS = {
    "set": "set",
    "order": "order",
    "cut": "cut",
    "unique_tokens": "computed tokens",
    "segments": "segments",
    "in_flight": "tokens in flight",
    "longest": "bound: longest path",
    "seconds": "seconds",
    "tflop": "TFLOP",
    "share_of_gemm_peak": "share of GEMM peak",
    "peak_memory_gib": "peak GiB",
    "recomputed_tokens": "recomputed tokens",
}


def random_sequences(tree: PrefixTree, sequences: Sequence[np.ndarray], generator: np.random.Generator) -> PrefixTree:
    """The forest of sequences in random order, each of which shares only what it has in common with the one before.

    A sequence that is a prefix of others comes right before the first of them, where it adds no token.

    Args:
        tree: the prefix tree of the sequences.
    """
    ending: dict[int, list[int]] = {}
    for sequence, node in enumerate(tree.sequence_node.tolist()):
        ending.setdefault(node, []).append(sequence)
    order: list[int] = []
    leaves = np.flatnonzero(tree.node_subtree_end == np.arange(1, tree.num_nodes + 1))
    for leaf in generator.permutation(leaves).tolist():
        on_path, node = [], leaf
        while node >= 0:
            on_path += ending.pop(node, [])
            node = int(tree.node_parent[node])
        order += on_path[::-1]
    arrays = as_sequences(sequences)
    shared = [0, *(_common(arrays[before], arrays[here]) for before, here in pairwise(order))]
    return build_from_order(arrays, np.asarray(order), np.asarray(shared[: len(order)]))


def _common(left: np.ndarray, right: np.ndarray) -> int:
    """Number of tokens with which both begin."""
    length = min(len(left), len(right))
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


def random_children(tree: PrefixTree, generator: np.random.Generator) -> PrefixTree:
    """The same forest with the children of every node, and the roots, in random order."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for node in generator.permutation(tree.num_nodes).tolist():
        children[tree.node_parent[node]].append(node)  # the parent of a root is -1: the last list
    order, waiting = [], list(children[-1])
    while waiting:
        node = waiting.pop()
        order.append(node)
        waiting += children[node]
    return tree.with_node_order(np.asarray(order))


def cut_at_forks(tree: PrefixTree, segment_tokens: int) -> SegmentPlan:
    """Segments of one branch each."""
    return cut_nodes(tree, tree.node_start[Branches.of(tree).node_begin], segment_tokens)


def cut_stream(tree: PrefixTree, segment_tokens: int) -> SegmentPlan:
    """Segments of ``segment_tokens`` each, wherever they end."""
    return cut_nodes(tree, np.zeros(1, dtype=np.int64), segment_tokens)


def measure_orders(
    report: PaperReport, timer: StepTimer, rollouts: RolloutSet, settings: StepSettings, seeds: int
) -> None:
    """The table of orders: counts are means over the seeds, of which the first is timed."""
    samples, size = rollouts.trajectories, settings.own_tokens
    sequences = trained_parts(samples)[0]
    tree = build_prefix_tree(sequences)

    def apart(generator: np.random.Generator) -> PrefixTree:
        return random_sequences(tree, sequences, generator)

    def shuffled(generator: np.random.Generator) -> PrefixTree:
        return random_children(tree, generator)

    def given(generator: np.random.Generator) -> PrefixTree:
        return tree

    cases: list[tuple[str, str, Callable[[np.random.Generator], PrefixTree], Callable, int]] = [
        ("random sequences", "at forks", apart, cut_at_forks, seeds),
        ("sorted", "at forks", given, cut_at_forks, 1),
        ("random children", "at forks", shuffled, cut_at_forks, seeds),
        ("sorted", f"every {size}", given, cut_stream, 1),
        ("random children", f"every {size}", shuffled, cut_stream, seeds),
        ("the planner's", "planned", given, plan_segments, 1),
    ]
    for order, cut, forest, cut_forest, count in cases:
        plans = [cut_forest(forest(np.random.default_rng(seed)), size) for seed in range(count)]
        # Every order may keep the activations of as many tokens as the longest sequence has.
        kept = choose_kept_segments(plans[0], rollouts.longest)
        row = measure(timer, plan_of_segments(timer, samples, plans[0], kept), settings)
        row |= {
            "unique_tokens": round(mean(plan.tree.num_tokens for plan in plans)),
            "segments": round(mean(plan.num_segments for plan in plans)),
            "in_flight": round(mean(plan.peak_in_flight_tokens for plan in plans)),
        }
        report.add("orders", {"set": rollouts.name, "order": order, "cut": cut, "longest": rollouts.longest, **row})
