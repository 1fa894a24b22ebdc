"""Pairs of ops that take turns: valid on every rank, and within the tokens in flight."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.planning.expert_parallel.overlap import pieces, with_pairs
from megatron_dta.planning.pipeline.schedule import PipelineOp, PipelineSchedule
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.passes import PassPlan

F, B = OpKind.FORWARD, OpKind.BACKWARD


def plan_of(ops: str, tokens: list[int]) -> PassPlan:
    """``ops`` such as "F0 B0"; ``tokens`` of each segment."""
    found = [PipelineOp(F if op[0] == "F" else B, int(op[1:])) for op in ops.split()]
    return PassPlan(PipelineSchedule(1, 1, [found]), [], most_tokens=[[tokens[op.segment] for op in found]])


def told(plan: PassPlan) -> str:
    names = [f"{op.kind.value}{op.segment}" for op in plan.schedule.ops[0]]
    return " ".join(
        names[piece[0]] if len(piece) == 1 else f"({' '.join(names[at] for at in piece)})"
        for piece in pieces(len(names), plan.schedule.pairs[0])
    )


@pytest.mark.parametrize(
    ("ops", "limit", "wanted"),
    [
        ("F0 F1 B1 F2 B2 B0", 9, "F0 F1 (F2 B1) B2 B0"),
        ("F0 F1 B1 F2 B2 B0", 8, "F0 F1 B1 F2 B2 B0"),
        ("F0 F1 F2 B2 B1 B0", 9, "F0 (F1 F2) B2 B1 B0"),
        ("F0 F1 F2", 0, "F0 (F1 F2)"),
        ("F0 F1 B1 B0 F2 B2", 9, "F0 F1 (F2 B1) B0 B2"),
    ],
)
def test_example(ops, limit, wanted):
    plan = plan_of(ops, [4, 3, 2])
    segments = [[op.segment] for op in plan.schedule.ops[0]]
    parents = [[-1, 0, -1 if "B0 F2" in ops else 0]]
    found = with_pairs(plan, segments, parents, [[4, 3, 2]], limit)
    assert told(found) == wanted
    assert found.most_tokens == [[[4, 3, 2][op.segment] for op in found.schedule.ops[0]]]


def test_the_ranks_decide_together():
    """On one rank segment 1 is the child of segment 0, on another one it is not; an empty segment forbids nothing."""
    plan = plan_of("F0 F1", [3, 3])
    lengths = [[3, 3], [3, 3]]
    for parents, segments, wanted in (
        ([[-1, -1], [-1, -1]], [[0, 0], [1, 1]], "(F0 F1)"),
        ([[-1, -1], [-1, 0]], [[0, 0], [1, 1]], "F0 F1"),
        ([[-1, -1], [-1, 0]], [[0, -1], [1, 1]], "(F0 F1)"),
    ):
        assert told(with_pairs(plan, segments, parents, lengths, 0)) == wanted


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed):
    """All ops once, children within their parents, never more in flight than allowed, and none of a pair needs the
    other."""
    generator = seed_all(seed)
    count = 9
    parents = [int(generator.integers(-1, i)) if i else -1 for i in range(count)]
    preorder, order = [], [i for i in range(count) if parents[i] < 0][::-1]
    while order:
        preorder.append(order.pop())
        order += [i for i in range(count) if parents[i] == preorder[-1]][::-1]
    number = {old: new for new, old in enumerate(preorder)}
    parents = [number.get(parents[old], -1) for old in preorder]
    lengths = generator.integers(1, 9, count).tolist()
    ops, path = [], []
    for segment, parent in enumerate(parents):
        while path and path[-1] != parent:
            ops.append(f"B{path.pop()}")
        ops.append(f"F{segment}")
        path.append(segment)
    plan = plan_of(" ".join(ops + [f"B{segment}" for segment in reversed(path)]), lengths)
    peak = max(np.cumsum([(1 if op.kind is F else -1) * lengths[op.segment] for op in plan.schedule.ops[0]]))
    limit = int(peak) + 3 * (seed % 3)
    found = with_pairs(plan, [[op.segment] for op in plan.schedule.ops[0]], [parents], [lengths], limit)
    ops = found.schedule.ops[0]
    assert set(ops) == set(plan.schedule.ops[0])
    assert len(ops) == 2 * count
    alive, done = set(), set()
    for piece in pieces(len(ops), found.schedule.pairs[0]):
        for at in piece:
            kind, segment, _ = ops[at]
            if kind is F:
                assert parents[segment] in {-1, *alive} - {ops[i].segment for i in piece}
                alive.add(segment)
                assert sum(lengths[each] for each in alive) <= limit
        for at in piece:
            kind, segment, _ = ops[at]
            if kind is B:
                assert all(child in done for child in range(count) if parents[child] == segment)
                assert piece == [at] or ops[piece[0]].kind is F
        for at in piece:
            if ops[at].kind is B:
                alive.remove(ops[at].segment)
                done.add(ops[at].segment)
    assert not alive
    assert found.schedule.has_pairs or seed % 3 == 0
    assert all(then - first >= 2 for first, then in pairwise(found.schedule.pairs[0]))
