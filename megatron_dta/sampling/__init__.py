"""Rollouts from the training weights: prompts, tokenizers, keyed random numbers, decoding, rewards.

``task.build_task`` reads the flags, ``source.SamplingSource`` hands training its rollouts, and
``source.SamplingEvaluation`` judges the weights on held-out prompts.
"""
