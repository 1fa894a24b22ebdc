"""Computes advantages, losses per token, and their weights in the loss of a step.

    total = sum over sequences q and tokens t of  loss_weights[q] * objective(logprobs, entropy, fields).loss[q, t]

``fields`` defines the inputs of an objective; ``make_objective`` builds one from the settings of a run.
"""

from megatron_dta.core.objectives.advantages import estimate_advantages, group_advantages, sequence_weights
from megatron_dta.core.objectives.dpo import preference_pairs
from megatron_dta.core.objectives.fields import LossFields, Objective, PairTerms, SequenceLoss, TokenLosses
from megatron_dta.core.objectives.policy import policy_loss
from megatron_dta.core.objectives.registry import make_objective, make_value_objective
from megatron_dta.core.objectives.sft import sft_loss
from megatron_dta.core.objectives.weights import TrainedCounts, count_trained, loss_weights, trajectory_shares

__all__ = [
    "LossFields",
    "Objective",
    "PairTerms",
    "SequenceLoss",
    "TokenLosses",
    "TrainedCounts",
    "count_trained",
    "estimate_advantages",
    "group_advantages",
    "loss_weights",
    "make_objective",
    "make_value_objective",
    "policy_loss",
    "preference_pairs",
    "sequence_weights",
    "sft_loss",
    "trajectory_shares",
]
