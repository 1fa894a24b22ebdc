"""Settings of the loss: objective, clipping, penalties, advantages, averaging, and the critic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import NO_FLAG, option

ADVANTAGE_ESTIMATORS = (
    *("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("treepo", "treepo_segment"),
)


policy_option = partial(option, needs="objective!=dpo,sft")
tis_option = partial(option, needs="use_tis")
dpo_option = partial(option, needs="objective=dpo")
critic_option = partial(option, needs="objective=ppo")


@dataclass
class ObjectiveConfig:
    """Settings of ``megatron_dta.core.objectives``; the sampling temperature is in ``SamplingConfig``."""

    objective: str = option(
        "grpo",
        "Loss to minimize. ppo trains a critic for its advantages, dpo trains on preference pairs of a group, sft "
        "maximizes the likelihood.",
        choices=("grpo", "ppo", "gspo", "gspo-token", "cispo", "dpo", "sft"),
    )
    eps_clip: float = policy_option(
        0.2, "The probability ratio is clipped from below at 1 minus this value.", above=0, maximum=1
    )
    eps_clip_high: float | None = policy_option(
        None, "The probability ratio is clipped from above at 1 plus this value (default: --eps-clip).", above=0
    )
    dual_clip: float | None = policy_option(
        None,
        "For tokens with negative advantage, bound the loss at this ratio, which is above 1 (default: no bound).",
        above=1,
    )
    kl_loss_coef: float = policy_option(
        0.0, "Weight of the KL divergence from the reference model in the loss.", minimum=0
    )
    kl_loss_type: str = option(
        "k3", "Estimator of the KL divergence in the loss.", choices=("k1", "k2", "k3"), needs="kl_loss_coef"
    )
    kl_coef: float = policy_option(
        0.0,
        "Weight of the KL divergence from the reference model in the reward: per token for ppo and "
        "reinforce_plus_plus, per response for the others.",
        minimum=0,
    )
    offload_reference: bool = option(
        False,
        "Keep the reference model and teachers in host memory, and on the device only while they compute logprobs; the "
        "teachers' output weights stay.",
        needs="kl_loss_coef or kl_coef or objective=dpo or teacher_load_hf",
    )
    entropy_coef: float = policy_option(0.0, "Weight of the entropy bonus.", minimum=0)
    loss_aggregation: str = option(
        "token-mean",
        "What the loss averages: all trained tokens of the batch (token-mean), the means of its sequences "
        "(sequence-mean), the means of its trajectories, each over all samples cut from it (trajectory-mean), or the "
        "sums of its sequences divided by a constant length (sequence-sum, as in Dr. GRPO).",
        choices=("token-mean", "sequence-mean", "trajectory-mean", "sequence-sum"),
        needs="objective!=dpo",
    )
    loss_length: float | None = option(
        None,
        "Constant length for sequence-sum: --rollout-max-response-len, or of stored rollouts --seq-length.",
        above=0,
        flag=NO_FLAG,
    )
    ppo_epochs: int = option(
        1, "Training passes over each rollout batch; old logprobs, values and advantages stay fixed.", minimum=1
    )
    use_tis: bool = policy_option(
        False,
        "Weight the surrogate loss by the ratio of the old to the sampler's probabilities (truncated importance "
        "sampling; with --rollout-max-staleness decoupled PPO).",
    )
    tis_mode: str = tis_option(
        "truncate",
        "Set ratios outside the bounds to the nearest bound (truncate) or to 0 (mask).",
        choices=("truncate", "mask"),
    )
    tis_level: str = tis_option(
        "token", "Compute one importance ratio per token or per sequence.", choices=("token", "sequence")
    )
    tis_clip: float = tis_option(2.0, "Upper bound of the importance ratio.", above=0)
    tis_clip_low: float = tis_option(0.0, "Lower bound of the importance ratio.", minimum=0)
    dpo_beta: float = dpo_option(0.1, "Scale of DPO's implicit reward.", above=0)
    dpo_pairs: str = dpo_option(
        "best-worst",
        "Preference pairs of a group: its best and its worst rollout, or all pairs with different rewards.",
        choices=("best-worst", "all"),
    )
    disable_grpo_std_normalization: bool = option(
        False,
        "Center advantages within their group, but do not divide them by the group's standard deviation.",
        needs=("advantage_estimator=grpo", "objective!=dpo,sft"),
    )
    advantage_estimator: str = policy_option("grpo", "How rewards become advantages.", choices=ADVANTAGE_ESTIMATORS)
    advantage_whitening: str | None = policy_option(
        None,
        "Normalize the advantages of all trained tokens of a rollout batch to mean 0 and variance 1 (default: token "
        "for reinforce_plus_plus, reinforce_plus_plus_baseline, treepo and treepo_segment).",
        choices=("none", "token"),
    )
    leaf_weights: str = policy_option(
        "none",
        "Where the weights of the leaves of sampled trees are applied, which makes means unbiased: in the baselines "
        "of advantages, in the loss, or in both.",
        choices=("none", "advantages", "loss", "both"),
    )
    treepo_advantages: list[str] | None = option(
        None,
        "Tree advantages: weight each level of the tree by the number of its leaves (size-weighted), omit the "
        "comparison with the whole group (drop-root), or those with subgroups whose rewards are all equal "
        "(reject-zero-variance).",
        choices=("size-weighted", "drop-root", "reject-zero-variance"),
        needs="advantage_estimator=treepo,treepo_segment",
    )
    old_logprobs: str = policy_option(
        "rollout",
        "Denominator of the probability ratio: the recorded logprobs of the sampler (rollout), or those of a forward "
        "pass before the first step (recompute).",
        choices=("rollout", "recompute"),
    )

    @property
    def needs_rollout_logprobs(self) -> bool:
        """Whether rollouts need the sampler's logprobs, of the same distribution that is trained."""
        return self.old_logprobs == "rollout" or self.use_tis


@dataclass
class CriticConfig:
    """The critic: a model like the policy with one value per token instead of logits, and its own optimizer."""

    gae_gamma: float = critic_option(1.0, "Discount factor of later rewards.", minimum=0, maximum=1)
    gae_lambda: float = critic_option(0.95, "Decay of generalized advantage estimation.", minimum=0, maximum=1)
    value_clip: float = critic_option(
        0.2, "Clip values to within this distance of the old values; 0 disables clipping.", minimum=0
    )
    critic_lr: float | None = critic_option(None, "Maximum learning rate of the critic (default: --lr).", minimum=0)
    critic_load: str | None = critic_option(
        None,
        "Checkpoint of a critic or a policy from which the critic starts (default: the policy's weights). The value "
        "head starts at random unless the checkpoint is a critic's.",
    )
    num_critic_only_steps: int = critic_option(0, "Initial steps that train only the critic.", minimum=0)
