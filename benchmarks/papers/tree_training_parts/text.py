"""Titles, columns and notes of the tables: what the paper reports, what is measured here, and why they differ."""

from __future__ import annotations

from collections.abc import Sequence

from papers.tables import PaperReport

STEP_COLUMNS = {
    "set": "set",
    "overlap": "overlap",
    "tokens": "tokens",
    "dense_seconds": "dense, s",
    "packed_seconds": "packed trees, s",
    "dta_seconds": "trees, s",
    "packed_speed_up": "speed-up, packed trees",
    "packed_bound": "bound",
    "packed_share_of_bound": "share",
    "dta_speed_up": "speed-up, trees",
    "dta_bound": "bound",
    "dta_share_of_bound": "share",
}
PAPER_STEP = (
    "The paper reports up to 6.2x (3.9x in its first two versions) less time of training on agent trajectories. Its "
    "factor depends on the data's overlap and on how well its baseline uses the GPU. Here the baseline is this engine "
    "on dense packed sequences without padding, with the same kernels, so the bound of a speed-up is the ratio of the "
    "operations. Packed trees are the paper's tree packing: they repeat a prefix in every pack that needs it. Trees "
    "are cut into segments and compute every token once, as in the paper's redundancy-free partition. A cell is empty "
    "where a pack did not fit in memory; the JSON file has the error. Seconds on a CPU are those of plain PyTorch "
    "attention, which computes masked pairs too, so they may be above the bound."
)
TABLES = {
    "overlap": ("Speed-up against the overlap: random trees", STEP_COLUMNS, PAPER_STEP),
    "sets": (
        "Speed-up on rollout sets",
        STEP_COLUMNS,
        "As above, on the first tokens of each set; sets whose first two sequences have more are left out. A pack has "
        "room for the longest sequence. The paper's trajectories are not published; if all operations shrink alike, "
        "6.2x needs an overlap of 0.84.",
    ),
    "packing": (
        "Tokens of packed trees",
        {
            "set": "set",
            "capacity": "capacity",
            "sequence_tokens": "dense",
            "contiguous_tokens": "contiguous",
            "leaves_first_fit_tokens": "first fit, leaves",
            "leaves_least_added_tokens": "least added, leaves",
            "runs_tokens": "first fit, runs",
            "better_tokens": "better of all",
            "unique_tokens": "unique",
            "contiguous_packs": "packs, contiguous",
            "better_packs": "packs, better",
            "saved_over_contiguous": "saved over contiguous",
            "over_unique": "above unique",
        },
        "The paper packs by tree-aware first fit decreasing: sequences by length, into the first pack with room for "
        "what they add, or into the pack to which they add least. Both are compared with the best contiguous cuts "
        "and first fit of whole runs of neighbours; training takes the better of all. A cell is empty where first "
        "fit would compare too much and is skipped. Unique tokens are the bound: trees in segments compute exactly "
        "these, at any capacity. A capacity below the longest sequence is raised to it.",
    ),
    "longest-path": (
        "Only the longest path of every tree",
        {
            "set": "set",
            "trees": "trees",
            "sequences": "sequences",
            "lost_tokens": "unique tokens lost",
            "lost_terms": "loss terms lost",
            "seed": "seed",
            "longest_path_distance": "gradient, longest paths",
            "longest_path_cosine": "its cosine",
            "packed_distance": "gradient, packed trees",
            "dta_distance": "gradient, trees",
        },
        "The paper's table of quality has this baseline, which trains one root-to-leaf path of each tree. A loss term "
        "is a trained token of a sequence. Gradients are distances from the exact one relative to its norm, in float64 "
        "on a small model with random weights and on the first tokens of a set; shares are of the whole set.",
    ),
    "learning-curves": (
        "Learning curves on arithmetic",
        {
            "way": "trained",
            "seed": "seed",
            "held_out_loss": "held-out loss, supervised",
            "held_out_after_sft": "solved",
            "held_out": "solved after GRPO",
            "sft_loss_difference": "largest difference, supervised loss",
            "held_out_loss_difference": "held-out loss",
            "grpo_loss_difference": "GRPO loss",
            "reward_difference": "GRPO reward",
        },
        "The paper shows that trees train like separate branches. Here all losses and rewards of a run in trees are "
        "compared with those of the dense run of the same seed, in float64: the differences are rounding. GRPO is on "
        "policy, so equal rewards mean equal samples. Longest paths see the same problems and fewer answers. "
        "Solved is the share of held-out problems; the reward is the share of right tokens.",
    ),
}


def add_tables(report: PaperReport, parts: Sequence[str]) -> None:
    """Empty tables of the parts."""
    for part in parts:
        title, columns, note = TABLES[part]
        report.table(part, title, columns, note)
