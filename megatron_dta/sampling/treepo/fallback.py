"""Chooses where a query branches again if all its paths finish before it has enough leaves.

A new branch starts at the end of an existing node, so it is conditioned on exactly the tokens that are recorded before
it. The candidates are finished paths. Each one in turn selects a node strictly above its leaf (possibly the root), and
this node gets up to N new children, until no leaves are missing.

    from-start   the root
    random       any finished path, in random order, regardless of its content
    finished     only paths with an end of sequence or an answer, in random order; the root if there are none
    longest      any path, the longest responses first

The node on a path is chosen uniformly (uniform), as the one before the segment with the least likely token
(min-logprob), or by softmax over -/+ the mean logprob of the segment after it (low-logprob, high-logprob).

Fallback depends on outcomes: it happens because paths ended early. Leaf weights account for this
(``SampledTree.leaf_weights``) for every choice made here.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree

_WITH_OUTCOME = (EndReason.EOS, EndReason.ANSWER, EndReason.ENVIRONMENT)


def fallback_nodes(tree: SampledTree, missing: int, settings: TreeSettings, draw: np.random.Generator) -> list[int]:
    """The parents of ``missing`` new children, one entry per child."""
    if settings.fallback == "from-start":
        return [0] * missing
    leaves = sorted(tree.leaves, key=lambda index: tree.nodes[index].path)
    if settings.fallback == "finished":
        leaves = [leaf for leaf in leaves if tree.nodes[leaf].end in _WITH_OUTCOME]
    if not leaves:
        return [0] * missing
    order = draw.permutation(len(leaves))
    if settings.fallback == "longest":
        lengths = np.array([tree.nodes[leaf].length for leaf in leaves])
        order = order[np.argsort(-lengths[order], kind="stable")]
    chosen: list[int] = []
    while len(chosen) < missing:  # once through all candidates may not be enough
        for place in order:
            node = _cut_point(tree, leaves[place], settings.fallback_point, draw)
            chosen += [node] * min(settings.branching_factor, missing - len(chosen))
    return chosen


def _cut_point(tree: SampledTree, leaf: int, policy: str, draw: np.random.Generator) -> int:
    """A node strictly above ``leaf``."""
    path = tree.lineage(leaf)
    above, behind = path[:-1], [tree.nodes[index] for index in path[1:]]
    if policy == "uniform":
        return above[int(draw.integers(len(above)))]
    if policy == "min-logprob":
        return above[int(np.argmin([node.logprobs[: node.num_sampled].min() for node in behind]))]
    means = np.array([node.logprob_sum / node.num_sampled for node in behind])
    scores = -means if policy == "low-logprob" else means
    shares = np.exp(scores - scores.max())
    return above[int(draw.choice(len(above), p=shares / shares.sum()))]
