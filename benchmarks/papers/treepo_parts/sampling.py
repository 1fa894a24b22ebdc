"""Compares sampling of trees with that of independent rollouts: their rates with simulated lengths, and their votes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from megatron_dta.common.quiet import quieten_libraries

quieten_libraries()  # before Megatron is imported, which warns of missing packages

from common.engine import add_arguments, build_setup
from megatron_dta.commands.evaluate_sampling import load_engine
from megatron_dta.sampling.evaluation import evaluate_answers
from megatron_dta.sampling.treepo.evaluation import sample_answers
from megatron_dta.sampling.treepo.sampler import TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.training.arguments import parse_arguments
from rollout_parts.trees import add_tree_arguments, compare_tokens, measure_trees, tree_settings


def efficiency(folder: Path, flags: list[str], segments: list[int]) -> list[dict[str, Any]]:
    """A row for trees of each segment length, and one for independent rollouts; ``flags`` are those of
    ``benchmarks/rollout.py``.

    ``effective_leaves`` is the mean of a query, ``effective_leaves_per_second`` counts all queries.
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    add_tree_arguments(parser)
    arguments = parser.parse_args(flags)
    alone = TreeSettings.independent(arguments.width, arguments.max_length)
    methods = {"independent": alone} | {str(segment): tree_settings(arguments, segment) for segment in segments}
    with torch.no_grad():
        measured = measure_trees(arguments, build_setup(arguments), methods)
    independent, lengths = measured.pop("independent")
    independent |= {"effective_leaves": float(arguments.width), "fallback_share": 0.0}
    rows = [{"segment": None, "method": "independent", **independent}]
    for segment, (row, trees) in measured.items():
        compared = compare_tokens(trees, lengths)
        row |= {name: compared[name] for name in ("effective_leaves", "fallback_share")}
        rows.append({"segment": int(segment), "method": "tree", **row})
    for row in rows:
        per_leaf = row["effective_leaves"] / arguments.width
        row["effective_leaves_per_second"] = per_leaf * row["trajectories_per_second"]
    return [{**row, "leaves": arguments.width, **_ratios(row, rows[0])} for row in rows]


def _ratios(row: dict[str, Any], independent: dict[str, Any]) -> dict[str, float]:
    """Decoded tokens and rates relative to independent rollouts."""
    rates = ("trajectories_per_second", "leaf_tokens_per_second", "effective_leaves_per_second", "decoded_tokens")
    return {f"{name}_ratio": row[name] / independent[name] for name in rates}


def votes(
    folder: Path, flags: list[str], segment: int, widths: list[int], factors: list[int], repeats: int
) -> list[dict[str, Any]]:
    """maj@k of k answers to each held-out problem, and the seconds that sampling them takes.

    Args:
        flags: of a training run, with ``--load``.
        segment: tokens of a segment.
        widths: values of k.
        factors: branching factors of the trees.
        repeats: timed runs, after one that compiles and captures; the median counts.
    """
    config = parse_arguments(flags)
    engine, task = load_engine(config)
    rows = []
    with torch.no_grad():
        for sampler, width, settings in _samplers(config.sampling.rollout_max_response_len, segment, widths, factors):
            seconds = []
            for _ in range(repeats + 1):
                before = engine.statistics()
                problems = sample_answers(TreeSampler(engine, settings), task, config, str.strip)
                after = engine.statistics()
                seconds.append(after["seconds"] - before["seconds"])
            judged = evaluate_answers(problems, [width], config.optimization.seed)
            rows.append(
                {
                    "sampler": sampler,
                    "k": width,
                    "majority": judged[f"maj@{width}"],
                    "reward": judged["reward"],
                    "decoded_tokens": int(after["decoded_tokens"] - before["decoded_tokens"]),
                    "sampling_seconds": median(seconds[1:]),
                }
            )
            print(rows[-1], flush=True)
    alone = {row["k"]: row for row in rows if row["sampler"] == "independent"}
    for row in rows:
        for name in ("sampling_seconds", "decoded_tokens"):
            row[f"{name}_ratio"] = row[name] / alone[row["k"]][name]
    return rows


def _samplers(
    response: int, segment: int, widths: list[int], factors: list[int]
) -> Iterator[tuple[str, int, TreeSettings]]:
    """(name, k, settings) of all ways to sample k answers."""
    for width in widths:
        yield "independent", width, TreeSettings.independent(width, response, segment)
        for factor in factors:
            if width > 1:
                tree = TreeSettings(width, response, segment, branching_factor=factor, initial_branches=2)
                yield f"trees, branching factor {factor}", width, tree
