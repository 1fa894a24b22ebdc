"""The loss: which objective, its clipping, its penalties, and how token losses are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class ObjectiveConfig:
    """Settings of ``megatron_dta.objectives``; the sampling temperature is in ``SamplingConfig``."""

    objective: str = option("grpo", "Loss to minimize.", choices=("grpo", "sft"))
    eps_clip: float = option(0.2, "The probability ratio is clipped below at 1 minus this.", above=0, maximum=1)
    eps_clip_high: float | None = option(
        None, "The ratio is clipped above at 1 plus this (default: --eps-clip).", above=0
    )
    dual_clip: float | None = option(
        None, "Bound the loss of tokens with negative advantage at this ratio, above 1 (default: unbounded).", above=1
    )
    kl_loss_coef: float = option(0.0, "Weight of the KL divergence from the reference model.", minimum=0)
    kl_loss_type: str = option("k3", "Estimator of that divergence.", choices=("k1", "k2", "k3"))
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    loss_aggregation: str = option(
        "token-mean",
        "Mean over all trained tokens of the batch, or over its sequences' own means.",
        choices=("token-mean", "sequence-mean"),
    )
    disable_grpo_std_normalization: bool = option(
        False, "Advantages are only centred within their group, not divided by the group's standard deviation."
    )
    advantage_estimator: str = option(
        "grpo",
        "How rewards become advantages.",
        choices=(
            "grpo",
            "dr_grpo",
            "rloo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "treepo",
            "treepo_segment",
        ),
    )
    advantage_whitening: str | None = option(
        None,
        "Bring the advantages of all trained tokens of a collection to mean 0 and variance 1 (default: token for "
        "reinforce_plus_plus, its baseline variant, treepo and treepo_segment).",
        choices=("none", "token"),
    )
    leaf_weights: str = option(
        "none",
        "Where leaves of sampled trees count by their weight, which makes means unbiased: in the means that advantages "
        "are taken against, in the loss, or in both.",
        choices=("none", "advantages", "loss", "both"),
    )
    treepo_size_weighted: bool = option(
        False, "Tree advantages: levels of the tree are weighed by the number of their leaves."
    )
    treepo_drop_root: bool = option(False, "Tree advantages: do not compare with the whole group.")
    treepo_reject_zero_variance: bool = option(
        False, "Tree advantages: do not compare with subgroups whose rewards are all equal."
    )
    old_logprobs: str = option(
        "rollout",
        "Denominator of the ratio: the sampler's logprobs as recorded, or a forward pass before the first step.",
        choices=("rollout", "recompute"),
    )
