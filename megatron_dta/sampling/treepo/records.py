"""Converts a sampled tree to rollouts, one per leaf, from which the tree can be reconstructed.

``segment_ends`` and ``branches`` identify the nodes on a leaf's path, so rollout files preserve the tree: two rollouts
of a group share the nodes up to which their branches agree (``rollouts.record``), without any comparison of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.record import Rollout, parts_of
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree, TreeNode


def tree_rollouts(
    tree: SampledTree, group_id: str, rewards: Mapping[int, float] | None = None, teacher: str | None = None
) -> list[Rollout]:
    """The rollouts of a complete tree, in the order of its leaves.

    Leaves at which the environment failed are left out; the weights of the others are rescaled to sum 1.

    Args:
        rewards: reward of each leaf by its index; None: use the rewards that the environment gave along the path.
    """
    weights, nodes = tree.leaf_weights(), tree.nodes
    leaves = [leaf for leaf in tree.leaves if nodes[leaf].end is not EndReason.ENVIRONMENT_FAILED]
    if not leaves:
        return []
    total = sum(weights[leaf] for leaf in leaves) if len(leaves) < len(tree.leaves) else 1.0
    paths = [[nodes[index] for index in tree.lineage(leaf)] for leaf in leaves]
    pieces = list(chain.from_iterable(paths))
    counts = [count for node in pieces for count in (node.num_sampled, len(node.token_ids) - node.num_sampled)]
    whole = Rollout(
        np.concatenate([node.token_ids for node in pieces]),
        np.repeat([True, False] * len(pieces), counts),
        logprobs=np.concatenate([node.logprobs for node in pieces]).astype(np.float32, copy=False),
    )
    fields = [
        _fields(path, None if rewards is None else rewards[leaf])
        | dict(group_id=group_id, leaf_weight=weights[leaf] / (total or 1.0), teacher=teacher)
        for leaf, path in zip(leaves, paths, strict=True)
    ]
    return parts_of(whole, np.array([nodes[leaf].length for leaf in leaves]), fields)


def _fields(path: Sequence[TreeNode], reward: float | None) -> dict[str, Any]:
    """The fields of a rollout that follow from the nodes on its path."""
    leaf = path[-1]
    return dict(
        reward=float(sum(node.reward for node in path)) if reward is None else reward,
        trajectory_id=".".join(map(str, leaf.path)),
        policy_version=min(node.policy_version for node in path[1:]),
        segment_ends=np.array([node.length for node in path], np.int32),
        branches=np.array([0, *leaf.path], np.int32),
        segment_rewards=np.array([node.reward for node in path], np.float32) if reward is None else None,
        fallback=leaf.fallback,
    )
