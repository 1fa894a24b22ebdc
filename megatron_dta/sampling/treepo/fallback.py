"""Chooses where a query branches again if all its paths finish before it has enough leaves.

A new branch starts at the end of an existing node, so it is conditioned on exactly the tokens that are recorded before
it. The candidates are finished paths, in random order. Each one in turn selects a node strictly above its leaf
(possibly the root) with equal probability, and this node gets up to N new children, until no leaves are missing.

    random       any finished path, regardless of its content
    finished     only paths with an end of sequence or an answer; the root if there are none

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
    leaves = sorted(tree.leaves, key=lambda index: tree.nodes[index].path)
    if settings.fallback == "finished":
        leaves = [leaf for leaf in leaves if tree.nodes[leaf].end in _WITH_OUTCOME]
    if not leaves:
        return [0] * missing
    order = draw.permutation(len(leaves))
    chosen: list[int] = []
    while len(chosen) < missing:  # once through all candidates may not be enough
        for leaf in order:
            above = tree.lineage(leaves[leaf])[:-1]
            node = above[int(draw.integers(len(above)))]
            chosen += [node] * min(settings.branching_factor, missing - len(chosen))
    return chosen
