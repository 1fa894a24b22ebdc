"""The loss: which objective, its clipping, its penalties, and how token losses are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class ObjectiveConfig:
    """Settings of ``megatron_dta.objectives``; the sampling temperature is in ``SamplingConfig``."""

    objective: str = option(
        "grpo",
        "Loss to minimize; ppo trains a critic for its advantages, dpo pairs of a group, sft the likelihood.",
        choices=("grpo", "ppo", "gspo", "gspo-token", "cispo", "dpo", "sft"),
    )
    eps_clip: float = option(0.2, "The probability ratio is clipped below at 1 minus this.", above=0, maximum=1)
    eps_clip_high: float | None = option(
        None, "The ratio is clipped above at 1 plus this (default: --eps-clip).", above=0
    )
    dual_clip: float | None = option(
        None, "Bound the loss of tokens with negative advantage at this ratio, above 1 (default: unbounded).", above=1
    )
    kl_loss_coef: float = option(0.0, "Weight of the KL divergence from the reference model in the loss.", minimum=0)
    kl_loss_type: str = option("k3", "Estimator of that divergence.", choices=("k1", "k2", "k3"))
    kl_coef: float = option(
        0.0,
        "Weight of the KL divergence from the reference model in the reward: of each token for ppo and "
        "reinforce_plus_plus, of the whole response for the others.",
        minimum=0,
    )
    kl_reward_type: str = option("k1", "Estimator of the divergence in the reward.", choices=("k1", "k2", "k3"))
    offload_reference: bool = option(
        False, "Keep the reference model in host memory; it is on the device only while it computes logprobs."
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    loss_aggregation: str = option(
        "token-mean",
        "Mean over all trained tokens of the batch, over its sequences' own means, over its trajectories' own means "
        "(of all samples that a trajectory was cut into), or over its sequences' sums divided by one constant length "
        "(Dr. GRPO).",
        choices=("token-mean", "sequence-mean", "trajectory-mean", "sequence-sum"),
    )
    loss_length: float | None = option(
        None, "Constant length of sequence-sum (default when sampling: --rollout-max-response-len).", above=0
    )
    shared_token_ownership: str = option(
        "every-path",
        "A sampled token that several sequences share trains with each of them, or with the first only; what the loss "
        "is divided by follows.",
        choices=("every-path", "first"),
    )
    ppo_epochs: int = option(
        1, "Times that a collection of rollouts is trained, its old logprobs, values and advantages fixed.", minimum=1
    )
    use_tis: bool = option(
        False,
        "Weigh the surrogate by the ratio of trainer and sampler on the weights that sampled (truncated importance "
        "sampling).",
    )
    tis_mode: str = option(
        "truncate", "Ratios outside of the bounds are moved to them, or count 0.", choices=("truncate", "mask")
    )
    tis_level: str = option("token", "One ratio for each token or sequence.", choices=("token", "sequence"))
    tis_clip: float = option(2.0, "Upper bound of that ratio.", above=0)
    tis_clip_low: float = option(0.0, "Lower bound of that ratio.", minimum=0)
    sampler_mismatch_alarm: float | None = option(
        None,
        "Warn when exp(mean |trainer's - sampler's logprob|) on the weights that sampled is above this, such as 1.05.",
        above=1,
    )
    sampler_mismatch_stop: int | None = option(
        None, "End the run, unsaved, after so many of these alarms in a row.", minimum=1
    )
    dpo_beta: float = option(0.1, "Scale of DPO's implicit reward.", above=0)
    dpo_label_smoothing: float = option(
        0.0, "Probability that a pair's preference is taken to be wrong.", minimum=0, maximum=0.5
    )
    dpo_pairs: str = option(
        "best-worst",
        "Pairs of a group: its best and its worst rollout, or all of different rewards.",
        choices=("best-worst", "all"),
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

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether the sampler's logprobs must be there, and be those of the distribution that the trainer trains."""
        return self.old_logprobs == "rollout" or self.use_tis or self.sampler_mismatch_alarm is not None


@dataclass
class CriticConfig:
    """A model like the policy with one number for each token in the place of logits, and an optimizer of its own."""

    gae_gamma: float = option(1.0, "Discount of later rewards.", minimum=0, maximum=1)
    gae_lambda: float = option(0.95, "Decay of generalized advantage estimation.", minimum=0, maximum=1)
    value_clip: float = option(0.2, "Values are clipped to this distance from the old ones; 0 for no clip.", minimum=0)
    critic_lr: float | None = option(None, "Highest learning rate of the critic (default: --lr).", minimum=0)
    critic_load: str | None = option(
        None,
        "Checkpoint the critic starts from, of a critic or of a policy (default: the policy's weights). Its value head "
        "starts at random unless the checkpoint is a critic's.",
    )
    num_critic_only_steps: int = option(0, "First steps that train the critic and not the policy.", minimum=0)
