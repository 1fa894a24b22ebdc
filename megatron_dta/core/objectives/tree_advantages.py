"""Computes advantages from the shape of the sampled tree: the leaves of each node are a group.

Source: TreePO (arXiv 2508.17445).

For leaf i with reward R_i and the nodes above it at depths j = 0 .. J - 1 (0: the prompt, whose leaves are the group):

    A_i = mean over j of (R_i - mean of R over the leaves below the node at depth j)

Nodes at depth 1 and more with a single leaf are left out of the mean, since they compare a leaf with itself. That is
one number for all tokens of a response (``treepo``). Per segment (``treepo_segment``), a node n that holds tokens gets

    A_n = mean over the nodes above n of (V(n) - V(node above)),    V(n) = mean of R over the leaves below n

A segment is therefore judged by all its continuations, the leaf's own segment is judged as above, and a shared segment
has one advantage in all responses that share it. With leaf weights the means are weighted: V(n) is then the mean of the
children's values, bottom up, an unbiased estimate of the value of the node's last state.

The options are the ablations of the paper: levels weighted by their number of leaves, no root level, and no levels
whose rewards are all equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.rollouts.paths import TreePaths, tree_paths
from megatron_dta.core.rollouts.record import Rollout


@dataclass(frozen=True)
class LevelOptions:
    """How the levels above a node are averaged."""

    weigh_by_size: bool = False
    drop_root: bool = False
    reject_zero_variance: bool = False


def tree_advantages(
    rollouts: Sequence[Rollout],
    rewards: np.ndarray,
    weights: np.ndarray,
    counted: np.ndarray,
    per_segment: bool,
    options: LevelOptions,
) -> list[np.ndarray]:
    """Advantage of each token of Q rollouts, float64 [T].

    Args:
        rewards: float [Q]; weights: float [Q], weight of each leaf in the means, equal where leaves count equally.
        counted: bool [Q], False for samples whose trajectory is represented by another sample.
    """
    tree = tree_paths(rollouts)
    below = _Leaves(tree, rewards, weights, counted)
    result = []
    for rollout, path, spans, reward in zip(rollouts, tree.paths, tree.spans, rewards, strict=True):
        if per_segment:
            values = np.zeros(len(path))
            for depth in range(1, len(path)):
                values[depth] = below.compare(below.mean[path[depth]], path[:depth], options)
            result.append(np.repeat(values, np.diff(spans)))
        else:
            result.append(np.full(len(rollout), below.compare(reward, path[:-1], options)))
    return result


class _Leaves:
    """For each node: number of leaves below it, weighted mean of their rewards, and whether these differ."""

    def __init__(self, tree: TreePaths, rewards: np.ndarray, weights: np.ndarray, counted: np.ndarray) -> None:
        use = [(path, i) for i, path in enumerate(tree.paths) if counted[i]]
        nodes = np.concatenate([path for path, _ in use])
        leaf = np.repeat([i for _, i in use], [len(path) for path, _ in use])
        count = tree.num_nodes
        self.size = np.bincount(nodes, minlength=count)
        total = np.bincount(nodes, weights[leaf], count)
        # A node whose leaves all have weight 0 has no weighted mean; there the leaves count equally.
        weight = np.where(total[nodes] > 0, weights[leaf], 1.0)
        self.mean = np.bincount(nodes, weight * rewards[leaf], count) / np.maximum(
            np.bincount(nodes, weight, count), 1e-300
        )
        lowest, highest = np.full(count, np.inf), np.full(count, -np.inf)
        np.minimum.at(lowest, nodes, rewards[leaf])
        np.maximum.at(highest, nodes, rewards[leaf])
        self.differ = highest > lowest
        # The mean of equal rewards may be off by one ulp.
        self.mean = np.where(self.differ, self.mean, np.where(np.isfinite(lowest), lowest, 0.0))

    def compare(self, value: float, above: np.ndarray, options: LevelOptions) -> float:
        """Mean over the nodes ``above`` (root first) of ``value`` minus the node's mean; 0 if no node remains."""
        keep = self.size[above] > 1
        keep[0] = not options.drop_root
        if options.reject_zero_variance:
            keep[1:] &= self.differ[above[1:]]
        kept = above[keep]
        if not len(kept):
            return 0.0
        gaps = value - self.mean[kept]
        return float(np.average(gaps, weights=self.size[kept] if options.weigh_by_size else None))
