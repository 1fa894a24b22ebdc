"""Compares balancers over data-parallel ranks by predicted cost; nothing is run, so no GPU is needed.

The slowest rank decides when a step ends. Its bound is the largest of: the cost of the whole forest divided by the
ranks, the costliest sequence, and what some rank must hold if there are more sequences than ranks (``least_slowest``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from common.planning.partition_baselines import contiguous, contiguous_by_cost, first_fit
from common.planning.partition_bound import least_slowest
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.partition.divide import Partition, Trained, partition_costs, trained_parts
from megatron_dta.core.planning.partition.sequence_costs import SequenceCosts
from megatron_dta.core.tree import build_prefix_tree
from papers.tables import COLORS, PaperReport

# Names in the rows, with those of the tables.
BALANCERS = {
    "ours": "ours",
    "by_cost": "contiguous, by predicted cost (the paper)",
    "by_tokens": "contiguous, by tokens (as shipped)",
    "first_fit": "first fit by length",
}
COLUMNS = {
    "ranks": "ranks",
    "balancer": "balancer",
    "over_bound": "slowest rank / bound",
    "worst_over_bound": "worst set",
    "max_over_mean": "slowest rank / mean",
    "duplicated": "tokens of all ranks / unique",
    "idle": "idle ranks, all sets",
}
SET_COLUMNS = {"set": "set", "ranks": "ranks", "unique_tokens": "unique tokens"} | {
    f"{name}_{value}": f"{name.replace('_', ' ')}: {heading}"
    for value, heading in (("over_bound", "slowest / bound"), ("tokens", "tokens"))
    for name in BALANCERS
}


@dataclass(frozen=True)
class BalanceSet:
    """The samples of one step that are divided over ranks."""

    name: str
    samples: Sequence[Trained]


def partitions(costs: SequenceCosts, ranks: int) -> dict[str, Partition]:
    """The partition of every balancer."""
    assigned = {
        "by_cost": contiguous_by_cost(costs, ranks),
        "by_tokens": contiguous(costs.tree, ranks),
        "first_fit": first_fit(costs.tree.sequence_lengths, ranks),
    }
    by_name = {name: Partition.of(costs, rank, ranks) for name, rank in assigned.items()}
    return {"ours": partition_costs(costs, ranks), **by_name}


def simulate_balance(report: PaperReport, sets: Sequence[BalanceSet], model: CostModel, ranks: Sequence[int]) -> None:
    """The tables of balancers: over all sets, and for each set."""
    by_ranks: dict[int, list[dict[str, Any]]] = {count: [] for count in ranks}
    for balance_set in sets:
        sequences, masks = trained_parts(balance_set.samples)
        costs = SequenceCosts.of(build_prefix_tree(sequences), model, masks)
        for count in ranks:
            if len(sequences) < count:
                continue
            row = {"set": balance_set.name, "ranks": count, "unique_tokens": costs.tree.num_tokens}
            row["bound_seconds"] = bound = least_slowest(costs, count)
            for name, partition in partitions(costs, count).items():
                row[f"{name}_over_bound"] = float(partition.cost_per_rank.max()) / bound
                row[f"{name}_max_over_mean"] = partition.max_over_mean
                row[f"{name}_tokens"] = int(partition.tokens_per_rank.sum())
                row[f"{name}_idle"] = int(np.count_nonzero(partition.tokens_per_rank == 0))
            report.add("balance_sets", row)
            by_ranks[count].append(row)
    for count, rows in by_ranks.items():
        for name, shown in BALANCERS.items() if rows else ():
            report.add("balance", {"ranks": count, "balancer": shown, "sets": len(rows), **_summary(rows, name)})


def _summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Geometric means over the sets, the worst set, and idle ranks."""

    def average(values: Sequence[float]) -> float:
        return exp(mean(log(value) for value in values))

    over = [row[f"{name}_over_bound"] for row in rows]
    return {
        "over_bound": average(over),
        "worst_over_bound": max(over),
        "max_over_mean": average([row[f"{name}_max_over_mean"] for row in rows]),
        "duplicated": average([row[f"{name}_tokens"] / row["unique_tokens"] for row in rows]),
        "idle": sum(row[f"{name}_idle"] for row in rows),
    }


def draw_balance(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Slowest rank over its bound, by number of ranks."""
    for color, shown in zip(COLORS, BALANCERS.values(), strict=False):
        shown_rows = [row for row in rows if row["balancer"] == shown]
        axes.plot(
            [row["ranks"] for row in shown_rows],
            [row["over_bound"] for row in shown_rows],
            "o-",
            color=color,
            label=shown,
        )
    axes.axhline(1, color="0.4", linestyle=":", label="bound")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["ranks"] for row in rows}), [str(n) for n in sorted({row["ranks"] for row in rows})])
    axes.set_xlabel("data-parallel ranks")
    axes.set_ylabel("predicted time of the slowest rank / bound")
    axes.set_title("Balance (geometric mean over the sets)")
    axes.legend(fontsize=7)
