"""TreePO (arXiv 2508.17445): how rollouts grow as trees. The paper's settings by name are in ``treepo_preset``."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option

FALLBACKS = ("none", "from-start", "random", "finished", "longest")
FALLBACK_POINTS = ("uniform", "min-logprob", "low-logprob", "high-logprob")


@dataclass
class TreePOConfig:
    """Settings of ``megatron_dta.sampling.treepo``; the width of a tree is ``--n-samples-per-prompt``."""

    rollout_method: str = option(
        "independent",
        "Sample the rollouts of a prompt independently, or as one tree that branches while it grows (TreePO).",
        choices=("independent", "treepo"),
    )
    treepo_preset: str | None = option(
        None,
        "The TreePO paper's recipe for sampler, loss, batches and schedule: depth x segment length, with 2 first "
        "branches (fixed) or 2 to 8 (more); a flag that is given goes before it.",
        choices=tuple(
            f"{init}-{shape}"
            for init in ("fixed", "more")
            for shape in ("56x128", "28x256", "14x512", "7x1024", "8x2048")
        ),
    )
    treepo_segment_length: int = option(512, "Tokens of a segment, after which a path may branch.", minimum=1)
    treepo_max_depth: int | None = option(
        None, "Most segments of a path (default: what --rollout-max-response-len holds).", minimum=1
    )
    treepo_branching_factor: int = option(
        2, "Branches that each path of a round brings to its query's budget.", minimum=1
    )
    treepo_initial_branches: int = option(2, "Branches at the prompt.", minimum=1)
    treepo_initial_branches_max: int | None = option(
        None, "Draw the number of branches at the prompt evenly from --treepo-initial-branches to this.", minimum=1
    )
    treepo_no_budget_transfer: bool = option(
        False, "Branches of paths that have finished in a round are not given to those still alive."
    )
    treepo_allocation: str = option(
        "even",
        "How a round's branches are divided: evenly, or more to paths of low or of high logprob.",
        choices=("even", "low-logprob", "high-logprob"),
    )
    treepo_allocation_score: str = option(
        "segment-mean",
        "Logprob of a path by which branches are divided.",
        choices=("segment-mean", "path-mean", "path-sum"),
    )
    treepo_allocation_temperature: float = option(2.0, "Temperature of that division; high divides evenly.", above=0)
    treepo_allocation_temperature_end: float | None = option(
        None, "Change that temperature to this along half a cosine.", above=0
    )
    treepo_allocation_temperature_iters: int | None = option(
        None, "Collections of rollouts over which it changes (default: --train-iters).", minimum=1
    )
    treepo_answer_pattern: str | None = option(
        None, "End a path at the segment in which its text has an answer: boxed, or a regular expression."
    )
    treepo_repetition_count: int | None = option(
        None,
        "End a path whose recent text holds the same characters this many times (default: do not look).",
        minimum=2,
    )
    treepo_repetition_length: int = option(32, "How many characters those are.", minimum=1)
    treepo_repetition_segments: int = option(2, "Recent text: this many segments.", minimum=1)
    treepo_repetition_first: bool = option(
        False, "A path that repeats itself counts as such even where it also ends by itself or has an answer."
    )
    treepo_fallback: str = option(
        "random",
        "Where a query whose paths have all finished before it has its rollouts branches again: nowhere, at the "
        "prompt, or on any finished path, on those with an end or an answer, or on the longest first.",
        choices=FALLBACKS,
    )
    treepo_fallback_point: str = option(
        "uniform",
        "Which node of that path: any alike, the one before the least likely token, or by the logprob of the segment "
        "behind it.",
        choices=FALLBACK_POINTS,
    )
    treepo_fallback_weight: str = option(
        "zero",
        "Leaf weight of rollouts grown by fallback: none, which keeps weighted means unbiased, or like all others.",
        choices=("zero", "share"),
    )
    treepo_branch_at: str = option(
        "segment",
        "With --environment: branch at segments and turns, or only where a turn has ended.",
        choices=("segment", "turn"),
    )
