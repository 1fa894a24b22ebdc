"""Predicts how long ranks that share experts wait for each other in a step, and what knowing the routes could save.

    python benchmarks/expert_balance.py FILE ... [--max-tokens 300000] [--skew 1.0] [--output FILE]

Two data-parallel ranks share the 128 experts of each layer of Qwen3-30B-A3B. In every op each rank computes the
attention of its own segment, then both exchange rows, and each computes its experts' rows of both segments; both
parts take as long as the rank with more. Routes are drawn: in every layer the logits of the experts are the sum of a
normal number of the layer, one of the task and one of the sequence, each with the standard deviation --skew, and
Gumbel noise of the token. The segments are those that training plans. "Paired" forms ops of any two segments, those
with the smallest sum of seconds that exchanges of partners find, without regard to trees or to the rank that holds a
segment. No packing and no division of sequences takes a layer below "floor": the rows of a whole step on the busier
rank, which only another placement of the experts changes.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from megatron_dta.common.command_line import CommandLineParser
from megatron_dta.common.entry_point import run_entry_point
from megatron_dta.core.planning.costs.model import ATTENTION_PASSES, ATTENTION_RATE, GEMM_PASSES, GEMM_RATE, CostModel
from megatron_dta.core.planning.partition.divide import partition_sequences, trained_parts
from megatron_dta.core.planning.segments.plan import SegmentPlan
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.extras.expert_parallel.planning.group_step import GroupStep
from megatron_dta.families.named_shapes import SHAPES

SHAPE, RANKS, SEGMENT_TOKENS, SAMPLED = SHAPES["qwen3-30b-a3b"], 2, 4096, 64
_ATTENTION_WEIGHTS = SHAPE.hidden_size * SHAPE.kv_channels * 2 * (SHAPE.num_attention_heads + SHAPE.num_query_groups)
SECONDS_PER_TOKEN = GEMM_PASSES * 2 * _ATTENTION_WEIGHTS / GEMM_RATE
SECONDS_PER_PAIR = ATTENTION_PASSES * 4 * SHAPE.num_attention_heads * SHAPE.kv_channels / ATTENTION_RATE
SECONDS_PER_ROW = GEMM_PASSES * 2 * 3 * SHAPE.hidden_size * SHAPE.moe_ffn_hidden_size / GEMM_RATE


class Routes:
    """The share of each sequence's rows that goes to the first half of the experts, in every layer."""

    def __init__(self, tasks: list[str], skew: float, seed: int) -> None:
        rng, layers, experts = np.random.default_rng(seed), SHAPE.num_layers, SHAPE.num_experts
        number = np.unique(tasks, return_inverse=True)[1]
        of_layer = rng.normal(0, skew, (layers, experts)).astype(np.float32)
        of_task = of_layer + rng.normal(0, skew, (number.max() + 1, layers, experts)).astype(np.float32)
        self.share, loads = np.empty((len(tasks), layers)), np.zeros((layers, experts))
        for sequence, task in enumerate(number):
            logits = of_task[task] + rng.normal(0, skew, (layers, experts)).astype(np.float32)
            noisy = logits + rng.gumbel(size=(SAMPLED, layers, experts)).astype(np.float32)
            chosen = np.argpartition(noisy, -SHAPE.moe_router_topk, axis=-1)[..., -SHAPE.moe_router_topk :]
            self.share[sequence] = (chosen < experts // RANKS).mean((0, 2))
            for layer in range(layers):
                loads[layer] += np.bincount(chosen[:, layer].ravel(), minlength=experts)
        self.busiest_expert = float((loads.max(1) / loads.mean(1)).mean())


def segment_rows(plan: SegmentPlan, share: np.ndarray) -> np.ndarray:
    """Rows of each segment on the first rank's experts, [segments, layers]: a token that several sequences share routes
    as the first of them."""
    owner = np.zeros(plan.tree.num_tokens, dtype=np.int64)
    for sequence in reversed(range(plan.tree.num_sequences)):
        owner[plan.tree.stream_indices(sequence)] = sequence
    bounds = plan.segment_start
    return np.array([share[owner[a:b]].sum(0) for a, b in pairwise(bounds.tolist())])


def seconds_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Seconds of ops of two segments each, given [..., 2 + layers]: seconds of attention, tokens, rows."""
    rows, layers = (first + second)[..., 2:] * SHAPE.moe_router_topk, SHAPE.num_layers
    tokens = (first + second)[..., 1:2] * SHAPE.moe_router_topk
    experts = np.maximum(rows, tokens - rows).sum(-1) * SECONDS_PER_ROW
    return layers * np.maximum(first[..., 0], second[..., 0]) + experts


def paired(segments: np.ndarray) -> np.ndarray:
    """Partners [ops, 2] of segments, improved by exchanges until none helps."""
    order = np.argsort(-segments[:, 0])
    pairs = order.reshape(-1, 2)
    improves = True
    while improves:
        improves = False
        for op in range(len(pairs)):
            (a, b), (c, d) = segments[pairs[op]], segments[pairs].swapaxes(0, 1)
            now = seconds_of(a, b) + seconds_of(c, d)
            other = np.stack([seconds_of(a, c) + seconds_of(b, d), seconds_of(a, d) + seconds_of(b, c)])
            gain = np.where(np.arange(len(pairs)) == op, 0, now - other)
            kind, best = np.unravel_index(gain.argmax(), gain.shape)
            if gain[kind, best] > 1e-9:
                pairs[op, 1], pairs[best, kind] = pairs[best, kind], pairs[op, 1]
                improves = True
    return pairs


def measure(file: str, arguments: argparse.Namespace) -> dict[str, object]:
    rollouts = load_rollouts(file)
    count = np.searchsorted(np.cumsum([len(r.token_ids) for r in rollouts]), arguments.max_tokens, side="right")
    rollouts = rollouts[: max(int(count), RANKS)]
    sequences, masks = trained_parts(rollouts)
    model = CostModel.from_shape(SHAPE, SEGMENT_TOKENS)
    step = GroupStep(sequences, masks, RANKS, StepBudget(SEGMENT_TOKENS), PipelineShape(cost_model=model))
    slowest = lambda divisions: [step.slowest(division) for division in divisions]  # noqa: E731
    rank_of = partition_sequences(sequences, RANKS, masks, model, step_seconds=slowest).rank_of_sequence
    plan = step.plan(rank_of, 0)
    routes = Routes([str(rollout.group_id) for rollout in rollouts], arguments.skew, arguments.seed)
    segments, empty = [], np.zeros((1, 2 + SHAPE.num_layers))
    for rank, (replica, _) in enumerate(plan.replicas):
        attention = replica.lengths * SECONDS_PER_TOKEN + replica.attention_pairs * SECONDS_PER_PAIR
        rows = segment_rows(replica, routes.share[np.flatnonzero(rank_of == rank)])
        segments.append(np.concatenate([np.stack([attention, replica.lengths], 1), rows], 1))
    today = [np.concatenate([part, empty])[nodes] for part, nodes in zip(segments, plan.tree.segment_of, strict=True)]
    every = np.concatenate([*segments, empty][: RANKS + sum(map(len, segments)) % 2])
    pairs = paired(every)
    ops = {"today": today, "paired": [every[pairs[:, 0]], every[pairs[:, 1]]]}
    rows = every[:, 2:].sum(0) * SHAPE.moe_router_topk
    tokens = every[:, 1].sum() * SHAPE.moe_router_topk
    even = SHAPE.num_layers * (every[:, 0].sum() + tokens * SECONDS_PER_ROW) / RANKS
    floor = np.maximum(rows, tokens - rows).sum() * SECONDS_PER_ROW + SHAPE.num_layers * every[:, 0].sum() / RANKS
    result: dict[str, object] = {
        "file": Path(file).name,
        "skew": arguments.skew,
        "sequences": len(sequences),
        "unique_tokens": int(every[:, 1].sum()),
        "segments": [len(part) for part in segments],
        "busiest_expert_over_mean": routes.busiest_expert,
        "share_of_experts": float(tokens * SECONDS_PER_ROW * SHAPE.num_layers / RANKS / even),
        "idle_floor": float(1 - even / floor),
    }
    for name, (first, second) in ops.items():
        span = seconds_of(first, second).sum()
        attention = SHAPE.num_layers * np.abs(first[:, 0] - second[:, 0]).sum() / RANKS
        result[f"idle_{name}"] = float(1 - even / span)
        result[f"idle_{name}_of_attention"] = float(attention / span)
        result[f"idle_{name}_of_experts"] = float((span - attention - even) / span)
    return result


def main() -> int:
    parser = CommandLineParser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="rollouts: .jsonl, .parquet or .npz")
    parser.add_argument("--max-tokens", type=int, default=300_000, help="sequences of each file up to this many tokens")
    parser.add_argument("--skew", type=float, default=1.0, help="standard deviation of each part of the logits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    results = [measure(file, arguments) for file in arguments.files]
    for result in results:
        print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_entry_point(main)
