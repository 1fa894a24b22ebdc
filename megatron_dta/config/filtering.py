"""Which rollouts are trained, and what their length costs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class FilterConfig:
    """Dynamic sampling and overlong shaping (DAPO, arXiv 2503.14476), rejection sampling for supervised training."""

    dynamic_sampling: bool = option(False, "Drop groups whose rewards are all equal and sample other prompts for them.")
    dynamic_sampling_max_rounds: int = option(
        3, "Most rounds of sampling for one collection; after the last one it is smaller.", minimum=1
    )
    overlong_buffer_len: int | None = option(
        None,
        "The last tokens before --rollout-max-response-len: a response that ends within them loses reward, linearly up "
        "to --overlong-penalty-factor (default: none does).",
        minimum=1,
    )
    overlong_penalty_factor: float = option(1.0, "Reward that a response of full length loses.", above=0)
    rejection_sampling: str | None = option(
        None,
        "With --objective sft: train only the best rollout of each group, or all with --rejection-reward-threshold.",
        choices=("best", "threshold"),
    )
    rejection_reward_threshold: float | None = option(
        None, "Least reward of a rollout that is trained; with best a group whose best is below it is left out."
    )
