"""Experiments of the published systems that this project contains, each by one command, like for like.

areal_dta      AReaL-DTA: throughput and memory of dense, packed trees and depth-first trees; balancers
tree_training  Tree Training: speed-up against the overlap of the sequences
treepo         TreePO: tree sampling against GRPO at equal tokens and at equal time, with its ablations
das            DAS: rollouts with and without drafts; its ablations
"""
