"""Samples rollouts from the training weights: prompts, tokenizers, keyed random numbers, engines, rewards.

``task.build_task`` reads the flags. ``build`` makes the source of training rollouts and the evaluation on held-out
prompts: independent responses (``sources``), or trees and multi-turn environments (``treepo``), on any engine
(``engines``).
"""
