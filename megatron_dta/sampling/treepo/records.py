"""Converts a sampled tree to rollouts, one per leaf, from which the tree can be reconstructed.

``segment_ends`` and ``branches`` identify the nodes on a leaf's path, so rollout files preserve the tree: two rollouts
of a group share the nodes up to which their branches agree (``rollouts.record``), without any comparison of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree, TreeNode


def tree_rollouts(
    tree: SampledTree, group_id: str, rewards: Mapping[int, float] | None = None, teacher: str | None = None
) -> list[Rollout]:
    """The rollouts of a complete tree, in the order of its leaves.

    Leaves at which the environment failed are left out; the weights of the others are rescaled to sum 1.

    Args:
        rewards: reward of each leaf by its index; None: use the rewards that the environment gave along the path.
    """
    weights = tree.leaf_weights()
    leaves = [leaf for leaf in tree.leaves if tree.nodes[leaf].end is not EndReason.ENVIRONMENT_FAILED]
    total = sum(weights[leaf] for leaf in leaves) if len(leaves) < len(tree.leaves) else 1.0
    return [
        _rollout(
            [tree.nodes[index] for index in tree.lineage(leaf)],
            None if rewards is None else rewards[leaf],
            group_id=group_id,
            leaf_weight=weights[leaf] / (total or 1.0),
            teacher=teacher,
        )
        for leaf in leaves
    ]


def _rollout(nodes: Sequence[TreeNode], reward: float | None, **fields: Any) -> Rollout:
    counts = [count for node in nodes for count in (node.num_sampled, len(node.token_ids) - node.num_sampled)]
    turn_rewards = np.array([node.reward for node in nodes], np.float32) if reward is None else None
    return Rollout(
        token_ids=np.concatenate([node.token_ids for node in nodes]),
        loss_mask=np.repeat([True, False] * len(nodes), counts),
        reward=float(sum(node.reward for node in nodes)) if reward is None else reward,
        logprobs=np.concatenate([node.logprobs for node in nodes]).astype(np.float32, copy=False),
        trajectory_id=".".join(map(str, nodes[-1].path)),
        policy_version=min(node.policy_version for node in nodes[1:]),
        segment_ends=np.array([node.length for node in nodes], np.int32),
        branches=np.array([0, *nodes[-1].path], np.int32),
        segment_rewards=turn_rewards,
        fallback=nodes[-1].fallback,
        **fields,
    )
