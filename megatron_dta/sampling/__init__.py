"""Rollouts from the training weights: prompts, tokenizers, keyed random numbers, decoding, rewards.

``task.build_task`` reads the flags; ``method`` makes the source that hands training its rollouts and the evaluation
that judges the weights on held-out prompts: independent responses (``source``), or trees and multi-turn environments
(``treepo``), on any engine (``engines``).
"""
