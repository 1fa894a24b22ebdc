"""Samples rollouts from the training weights: prompts, tokenizers, engines, rewards.

``task.build_task`` reads the flags. Sources of training rollouts and evaluations on held-out prompts: independent
responses (``sources``), and trees and multi-turn environments (``treepo``), on the engine of this process
(``in_process``) or of servers and for agents (extras). ``wiring.sources`` builds them.
"""
