"""Computes advantages, losses per token, and their weights in the loss of a step.

    total = sum over sequences q and tokens t of  loss_weights[q] * objective(logprobs, entropy, fields).loss[q, t]

``fields`` defines the inputs of an objective; ``make_objective`` builds one from the settings of a run.
"""
