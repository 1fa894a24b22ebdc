"""Settings of sampling rollouts as trees (TreePO, arXiv 2508.17445).

The paper's own settings are available by name, see ``derived.treepo_preset``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import option

FALLBACKS = ("none", "from-start", "random", "finished", "longest")
FALLBACK_POINTS = ("uniform", "min-logprob", "low-logprob", "high-logprob")


treepo_option = partial(option, needs="rollout_method=treepo")


@dataclass
class TreePOConfig:
    """Settings of ``megatron_dta.sampling.treepo``; the width of a tree is ``--n-samples-per-prompt``."""

    rollout_method: str = option(
        "independent",
        "Sample the rollouts of a prompt independently, or as one tree that branches while it grows (TreePO).",
        choices=("independent", "treepo"),
        needs="prompt_data or task",
    )
    treepo_preset: str | None = option(
        None,
        "The TreePO paper's recipe for sampler, loss, batches and schedule, named by depth x segment length, with 2 "
        "initial branches (fixed) or 2 to 8 (more); flags that are given take precedence.",
        choices=tuple(
            f"{init}-{shape}"
            for init in ("fixed", "more")
            for shape in ("56x128", "28x256", "14x512", "7x1024", "8x2048")
        ),
        needs=("prompt_data or task", "rollout_method=treepo"),
    )
    treepo_segment_length: int = treepo_option(
        512, "Tokens per segment; a path may branch at the end of each segment.", minimum=1
    )
    treepo_max_depth: int | None = treepo_option(
        None,
        "Maximum number of segments in a path (default: as many as fit into --rollout-max-response-len).",
        minimum=1,
    )
    treepo_branching_factor: int = treepo_option(
        2, "Branches that each path of a round adds to the budget of its query.", minimum=1
    )
    treepo_initial_branches: int = treepo_option(2, "Branches at the prompt.", minimum=1)
    treepo_initial_branches_max: int | None = treepo_option(
        None, "Draw the number of branches at the prompt uniformly from --treepo-initial-branches to this.", minimum=1
    )
    treepo_no_budget_transfer: bool = treepo_option(
        False, "Do not give the branches of paths that finished in a round to those still alive."
    )
    treepo_allocation: str = treepo_option(
        "even",
        "How the branches of a round are divided: evenly, or more to paths of low or of high logprob.",
        choices=("even", "low-logprob", "high-logprob"),
    )
    treepo_allocation_score: str = option(
        "segment-mean",
        "Logprob of a path by which the branches are divided.",
        choices=("segment-mean", "path-mean", "path-sum"),
        needs="treepo_allocation!=even",
    )
    treepo_allocation_temperature: float = option(
        2.0,
        "Temperature of the division by logprob; high values divide evenly.",
        above=0,
        needs="treepo_allocation!=even",
    )
    treepo_allocation_temperature_end: float | None = option(
        None,
        "Anneal the temperature of the division to this value along half a cosine.",
        above=0,
        needs="treepo_allocation!=even",
    )
    treepo_allocation_temperature_iters: int | None = option(
        None,
        "Number of rollout batches over which the temperature changes (default: those of --train-iters).",
        minimum=1,
        needs="treepo_allocation_temperature_end",
    )
    treepo_answer_pattern: str | None = treepo_option(
        None, "End a path at the segment in which its text contains an answer: boxed, or a regular expression."
    )
    treepo_repetition_count: int | None = treepo_option(
        None,
        "End a path whose recent text contains the same characters this many times (default: no check).",
        minimum=2,
    )
    treepo_repetition_length: int = option(
        32, "Number of characters in the repeated text.", minimum=1, needs="treepo_repetition_count"
    )
    treepo_repetition_segments: int = option(
        2, "Number of recent segments searched for repetition.", minimum=1, needs="treepo_repetition_count"
    )
    treepo_repetition_first: bool = option(
        False,
        "Give repetition as the reason for the end of a path even if the path also ended by itself or has an answer.",
        needs="treepo_repetition_count",
    )
    treepo_fallback: str = treepo_option(
        "random",
        "Where a query branches again whose paths have all finished before it has its rollouts: nowhere (none), at "
        "the prompt (from-start), on any finished path (random), on those with an end or an answer (finished), or on "
        "the longest first (longest).",
        choices=FALLBACKS,
    )
    treepo_fallback_point: str = option(
        "uniform",
        "Node of that path at which it branches: any with equal probability (uniform), the one before the least "
        "likely token (min-logprob), or one drawn by the logprob of the segment after it (low-logprob, high-logprob).",
        choices=FALLBACK_POINTS,
        needs="treepo_fallback!=none,from-start",
    )
    treepo_fallback_weight: str = option(
        "zero",
        "Leaf weight of rollouts grown by fallback: zero, which keeps weighted means unbiased, or the share of any "
        "other leaf.",
        choices=("zero", "share"),
        needs="treepo_fallback!=none",
    )
    treepo_branch_at: str = option(
        "segment",
        "With --environment: branch at the ends of segments and turns, or only at the ends of turns.",
        choices=("segment", "turn"),
        needs=("rollout_method=treepo", "environment"),
    )
