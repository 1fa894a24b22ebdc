"""The prefix forest of a batch of token sequences, as NumPy arrays in depth-first preorder.

``build_prefix_tree`` builds it. ``build_forest_without_sharing`` gives the same form to sequences that must not share
prefixes (dense training). ``tree_statistics`` measures how much work the sharing saves.
"""

from megatron_dta.core.tree.prefix_tree import PrefixTree, build_forest_without_sharing, build_prefix_tree
from megatron_dta.core.tree.statistics import TreeStatistics, tree_statistics

__all__ = ["PrefixTree", "TreeStatistics", "build_forest_without_sharing", "build_prefix_tree", "tree_statistics"]
