"""Runs of segments follow every path: states and rows come from the parent, in levels that can be computed."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_dta.core.planning.segments.plan import SegmentPlan, depth_first_schedule, plan_segments
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.planning.segments.slots import allocate_slots
from megatron_dta.core.tree.prefix_tree import build_prefix_tree
from segment_planner_cases import random_sequences


def plan(sequences: list, segment_tokens: int) -> SegmentPlan:
    return plan_segments(build_prefix_tree([np.asarray(s, dtype=np.int32) for s in sequences]), segment_tokens)


def check(segments: SegmentPlan, width: int) -> None:
    """Run the plan on the token numbers themselves: a state is the path's tokens, a row is its token."""
    runs, parent = SegmentRuns.of(segments), segments.tree.parent.tolist()
    slot_start, num_slots = allocate_slots(segments, depth_first_schedule(segments), runs.open_forks)
    assert num_slots == runs.forks_in_flight.max(initial=0)
    states: list = [None] * num_slots
    rows: list = [None] * num_slots

    def path_of(token: int) -> tuple[int, ...]:
        path = []
        while token >= 0:
            path.append(token)
            token = parent[token]
        return tuple(reversed(path))

    for segment in range(segments.num_segments):
        plan = runs.states_of(segment, slot_start, width)
        begin, end = segments.segment_start[segment : segment + 2].tolist()
        local = [states[slot] for slot in plan.entry_slots] + [()]
        seen = []
        for level in plan.levels:
            offsets = np.append(0, np.cumsum(level.lengths))
            tokens = (level.tokens + begin).tolist()
            exits = []
            for run, entry in enumerate(level.entry):
                state = local[entry]
                for token in tokens[offsets[run] : offsets[run + 1]]:
                    state = (*state, token)
                    assert state == path_of(token)
                exits.append(state)
            local += [exits[run] for run in level.forks]
            seen += tokens
        assert sorted(seen) == list(range(begin, end))
        table = list(range(begin, end)) + [row for slot in plan.entry_slots for row in rows[slot]] + [None]
        laid = [table[source] for source in plan.row_source]
        for token in range(begin, end):
            at = plan.token_row[token - begin]
            wanted = [None] * width + list(path_of(token))
            assert laid[at - width + 1 : at + 1] == wanted[-width:]
        assert len(plan.kept) == len(plan.kept_rows) == runs.open_forks[segment]
        for slot, (state, kept) in enumerate(zip(plan.kept, plan.kept_rows, strict=True), start=plan.slot):
            states[slot], rows[slot] = local[state], [table[row] for row in kept]
            assert rows[slot] == ([None] * width + list(local[state]))[len(local[state]) + 1 :]


@pytest.mark.parametrize("seed", range(5))
def test_states_and_rows_follow_every_path(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, int(rng.integers(1, 40)), 3, int(rng.integers(2, 20)))
    for segment_tokens in (1, 3, 8, 1000):
        check(plan(sequences, segment_tokens), width=int(rng.integers(1, 6)))


def test_forks_at_the_root_one_token_runs_and_hundreds_of_siblings():
    check(plan([[i] for i in range(300)], 7), 4)
    check(plan([[0, i] for i in range(300)], 64), 4)
    check(plan([[0, 1, i, i] for i in range(100)] + [[0, 2]] + [[7]], 5), 3)
    comb = [[0] * depth + [1, 1] for depth in range(40)] + [[0] * 40]
    check(plan(comb, 6), 4)
    check(plan([], 6), 4)
