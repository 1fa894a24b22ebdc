"""Tables of the TreePO experiment: their columns, and what the paper claims, what is measured here and what differs."""

from __future__ import annotations

from papers.tables import PaperReport

_CURVES = (
    "The paper (arXiv 2508.17445) trains a 7B model on mathematics and reports 46.6 for GRPO, 54.6 with tree sampling "
    "and 56.9 to 58.2 with its advantages (maj@16), single runs, by steps and not by cost. Here a small model learns "
    "addition in columns. Every run starts from the same warmed-up weights of its seed (without --small, of all "
    "seeds), has the same loss, learning rate and number of rollouts a prompt, and ends with the step that reaches the "
    "budget of decoded tokens. So the "
    "methods differ in how they sample and in their advantages alone. Rewards at equal seconds are those at the "
    "seconds of the fastest run. Savings compare the cost of the reward `target` with GRPO of the same seed (blank: "
    "not reached, or reached before training). Seconds leave out evaluations, and the first step counts as the median "
    "of the others. Trees have longer responses on average and correlated leaves, so fewer decoded tokens a leaf need "
    "not mean fewer for a reward."
)
_RUNS = "All runs of the curves. JSON has the points of each curve."
_ABLATIONS = (
    "Each row changes TreePO (first row) in one setting and ends at the same budget of decoded tokens; rows of the "
    "group fallback all have two segments, so that most leaves come from fallback. Effective leaves are 1 / (sum of "
    "squared weights); leaves of fallback have weight 0. One run differs from another by its seed as much as the "
    "spread of the curves says, so smaller differences mean nothing. "
    "Allocation has a temperature of 2 where no other is named, as in the paper; logprobs that differ by much less are "
    "divided evenly, as in the first row. The paper finds uniform allocation no worse than "
    "allocation by logprob, the plain mean of the terms better than the size-weighted one, and the root term without "
    "effect. The release has in addition, and this project has not: segment values by sizes of the subgroups with a "
    "discount (`tree_segment_reinforce_plus_plus_baseline`), the z-score among siblings (SPO), allocation by tokens "
    "left (`by_infer_step_token_budget`) or at random (`by_random_div_MtoN`), and a width by the response's tokens "
    "(`by_response_token`). Its fallback cuts responses at multiples of a window, here at ends of segments."
)
_EFFICIENCY = (
    "Lengths are drawn from a lognormal distribution, since random weights have no meaningful lengths. The paper "
    "reports 1.40 times the trajectories/s and 1.30 times the tokens/s, prefill included, over independent sampling. "
    "Trajectories/s count leaves that share prefixes. Effective leaves are 1 / (sum of squared weights). They count "
    "unequal weights and leave out that leaves with a common prefix are correlated, so for a mean a tree is worth at "
    "most as many independent rollouts, and by these a second trees may be slower."
)
_VOTES = (
    "maj@k of k answers to the held-out problems. The paper's 22 to 43% fewer GPU-hours are of this comparison, "
    "sampling a trained model with trees of 8 x 2,048 instead of independently, and 43% goes with 3.5 points less "
    "(58.2 to 54.7). It asks for 16 answers; here each k is sampled for itself. A share of N problems has a standard "
    "error of up to 0.5 / sqrt(N): 0.06 with --small, 0.04 without it."
)


def add_tables(report: PaperReport) -> None:
    """The tables, in their order."""
    report.table("curves", "TreePO and GRPO at equal cost", _CURVE_COLUMNS, _CURVES)
    report.table("ablations", "Ablations", {"group": "group", "name": "variant", **_RUN_COLUMNS}, _ABLATIONS)
    report.table("efficiency", "Sampling efficiency", _EFFICIENCY_COLUMNS, _EFFICIENCY)
    report.table("votes", "maj@k by seconds of sampling", _VOTE_COLUMNS, _VOTES)
    report.table("runs", "Runs", {"method": "method", "seed": "seed", **_RUN_COLUMNS}, _RUNS)


_CURVE_COLUMNS = {
    "method": "method",
    "seeds": "seeds",
    "tokens": "decoded tokens",
    "reward_quarter": "reward at 1/4 of them",
    "reward_half": "1/2",
    "reward": "all",
    "reward_spread": "standard deviation",
    "reward_at_equal_sampling": "at equal sampling s",
    "reward_at_equal_seconds": "at equal s",
    "sampling_of_run": "sampling s",
    "seconds_of_run": "all s",
    "target": "target",
    "tokens_saved": "tokens saved",
    "sampling_saved": "sampling s saved",
    "seconds_saved": "s saved",
}
_RUN_COLUMNS = {
    "reward": "held-out reward",
    "steps": "steps",
    "decoded_tokens": "decoded tokens",
    "leaves": "leaves",
    "effective_leaves": "effective leaves",
    "fallback_share": "fallback share",
    "decoded_share": "decoded / leaf tokens",
    "sampling_seconds": "sampling s",
    "seconds": "all s",
    "error": "error",
}
_EFFICIENCY_COLUMNS = {
    "segment": "segment",
    "method": "method",
    "trajectories_per_second": "trajectories/s",
    "leaf_tokens_per_second": "leaf tokens/s",
    "effective_leaves_per_second": "effective leaves/s",
    "decoded_tokens": "decoded tokens",
    "leaves": "leaves",
    "effective_leaves": "effective leaves",
    "fallback_share": "fallback share",
    "trajectories_per_second_ratio": "trajectories/s, ratio",
    "leaf_tokens_per_second_ratio": "leaf tokens/s, ratio",
    "effective_leaves_per_second_ratio": "effective leaves/s, ratio",
}
_VOTE_COLUMNS = {
    "model": "weights",
    "sampler": "sampler",
    "k": "k",
    "majority": "maj@k",
    "reward": "reward",
    "decoded_tokens": "decoded tokens",
    "sampling_seconds": "sampling s",
    "decoded_tokens_ratio": "tokens, ratio",
    "sampling_seconds_ratio": "s, ratio",
}
