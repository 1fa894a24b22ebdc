"""Samples rollouts from the training weights: prompts, tokenizers, keyed random numbers, engines, rewards.

``task.build_task`` reads the flags. Sources of training rollouts and evaluations on held-out prompts: independent
responses (``sources``), trees and multi-turn environments (``treepo``), and agents (``agents``), on any engine
(``engines``). ``training.rollout_source`` builds them.
"""
