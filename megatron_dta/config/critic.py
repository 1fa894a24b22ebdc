"""The critic of PPO: how its values become advantages, and how it is trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


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
