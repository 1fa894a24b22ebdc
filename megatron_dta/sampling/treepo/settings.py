"""Settings of the tree sampler, built from the flags or by hand."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.sampling.config import SamplingConfig, TreePOConfig


@dataclass(frozen=True)
class TreeSettings:
    """Settings by which one query's tree grows; ``config.TreePOConfig`` and ``policy`` explain each.

    Attributes:
        width: leaves wanted per query.
        max_response_tokens: maximum length of a response, including observed tokens of an environment.
        segment_tokens: tokens of a segment; None: a segment is a whole response (or turn).
        initial_branches, initial_branches_max: branches at the root, drawn uniformly from that range.
        allocation: "even", "low-logprob" or "high-logprob".
        temperature: of the division by logprob.
        fallback: "none", "random" or "finished".
    """

    width: int
    max_response_tokens: int
    segment_tokens: int | None = None
    branching_factor: int = 2
    initial_branches: int = 2
    initial_branches_max: int | None = None
    allocation: str = "even"
    temperature: float = 2.0
    fallback: str = "random"

    @classmethod
    def independent(cls, width: int, max_response_tokens: int, segment_tokens: int | None = None) -> TreeSettings:
        """``width`` independent rollouts: a tree that branches only at its root.

        ``segment_tokens`` sets how often the stops that are checked at segment ends apply.
        """
        return cls(
            width, max_response_tokens, segment_tokens, branching_factor=1, initial_branches=width, fallback="none"
        )

    @classmethod
    def from_config(cls, treepo: TreePOConfig, sampling: SamplingConfig) -> TreeSettings:
        """Settings from the flags."""
        if treepo.rollout_method == "independent":
            return cls.independent(sampling.n_samples_per_prompt, sampling.rollout_max_response_len)
        return cls(
            sampling.n_samples_per_prompt, sampling.rollout_max_response_len, treepo.treepo_segment_length,
            treepo.treepo_branching_factor, treepo.treepo_initial_branches, treepo.treepo_initial_branches_max,
            treepo.treepo_allocation, treepo.treepo_allocation_temperature, treepo.treepo_fallback,
        )  # fmt: skip
