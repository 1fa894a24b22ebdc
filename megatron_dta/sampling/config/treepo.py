"""Settings of sampling rollouts as trees (TreePO, arXiv 2508.17445)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import option

FALLBACKS = ("none", "random", "finished")


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
    treepo_segment_length: int = treepo_option(
        512,
        "Tokens per segment; a path may branch at the end of each segment, and with --environment of each turn.",
        minimum=1,
    )
    treepo_branching_factor: int = treepo_option(
        2, "Branches that each path of a round adds to the budget of its query.", minimum=1
    )
    treepo_initial_branches: int = treepo_option(2, "Branches at the prompt.", minimum=1)
    treepo_initial_branches_max: int | None = treepo_option(
        None, "Draw the number of branches at the prompt uniformly from --treepo-initial-branches to this.", minimum=1
    )
    treepo_allocation: str = treepo_option(
        "even",
        "How the branches of a round are divided: evenly, or more to paths of low or of high logprob.",
        choices=("even", "low-logprob", "high-logprob"),
    )
    treepo_allocation_temperature: float = option(
        2.0,
        "Temperature of the division by logprob; high values divide evenly.",
        above=0,
        needs="treepo_allocation!=even",
    )
    treepo_answer_pattern: str | None = treepo_option(
        None, "End a path at the segment in which its text contains an answer: boxed, or a regular expression."
    )
    treepo_fallback: str = treepo_option(
        "random",
        "Where a query branches again whose paths have all finished before it has its rollouts: nowhere (none), "
        "on any finished path (random), or on those with an end or an answer (finished).",
        choices=FALLBACKS,
    )
