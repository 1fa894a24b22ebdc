"""The prefix forest of a batch of token sequences, as numpy arrays in depth-first preorder.

``build_prefix_tree`` computes it, ``build_forest_without_sharing`` gives the same form to a batch whose prefixes are
not to be shared (dense training), and ``tree_statistics`` says what the sharing is worth.
"""

from megatron_dta.tree.build import build_forest_without_sharing, build_prefix_tree
from megatron_dta.tree.prefix_tree import PrefixTree
from megatron_dta.tree.statistics import TreeStatistics, tree_statistics

__all__ = [
    "PrefixTree",
    "TreeStatistics",
    "build_forest_without_sharing",
    "build_prefix_tree",
    "tree_statistics",
]
