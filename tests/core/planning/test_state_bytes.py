"""Plans within a memory limit count the states of gated delta net: slot by slot, and at combs of many forks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from test_step_choice import EACH, shape_of

from conftest import seed_all
from megatron_dta.common.named_shapes import SHAPES
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.memory_budget import StageBytes
from megatron_dta.core.planning.costs.segment_bytes import RankTensors, SegmentBytes
from megatron_dta.core.planning.costs.state_bytes import StateBytes, StepStates
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.segments.plan import plan_segments
from megatron_dta.core.planning.segments.runs import SegmentRuns
from megatron_dta.core.planning.step import search as step_search
from megatron_dta.core.planning.step.passes import StepBudget, stage_chunks, stage_peak_bytes, state_slots
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.tree import build_prefix_tree
from segment_planner_cases import random_sequences

STATES = StateBytes(open_fork=90.0, exit=30.0, state=8.0)


@pytest.fixture(autouse=True)
def _small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_search, "SIZES", (64, 32, 16, 8, 4))


def comb(teeth: int) -> list[TrainingSample]:
    """A path that forks behind every second token."""
    spine = np.zeros(2 * teeth, dtype=np.int32)
    sequences = [np.append(spine[: 2 * tooth], [1, 2, tooth % 3]) for tooth in range(1, teeth)] + [spine]
    return [TrainingSample(tokens.astype(np.int32), np.arange(len(tokens)) > 0) for tokens in sequences]


def test_a_comb_of_many_forks_stays_within_the_limit_or_is_refused() -> None:
    samples, planned, refused, sizes = comb(60), 0, [], set()
    for available in (2000, 4000, 6000, 9000, 12_000, 20_000, 60_000):
        shape = shape_of(float(available))
        shape = replace(shape, memory=replace(shape.memory, stages=(StageBytes(EACH, STATES),)))
        try:
            step = plan_step(samples, "dta", pipeline=shape)
        except InputError as error:
            refused.append(str(error))
            continue
        assert stage_peak_bytes(step.segments, step.training, shape, 0) <= available
        planned += 1
        sizes.add(step.segments.segment_tokens)
        # Without its states the same plan would seem to need less.
        unaware = replace(shape, memory=replace(shape.memory, stages=(StageBytes(EACH),)))
        assert stage_peak_bytes(step.segments, step.training, unaware, 0) < available
    assert planned > 2
    assert refused
    assert all("--tree-memory-gib" in message for message in refused)
    assert len(sizes) > 1


@pytest.mark.parametrize("seed", range(6))
def test_counts_of_states_are_those_of_the_segments(seed: int) -> None:
    rng = seed_all(seed)
    tree = build_prefix_tree(random_sequences(rng, 30, 3, 12))
    for segment_tokens in (3, 9, 500):
        segments = plan_segments(tree, segment_tokens)
        runs = SegmentRuns.of(segments)
        step = StepStates.of([runs.counts], STATES, int(runs.forks_in_flight.max(initial=0)))
        slots = np.zeros(segments.num_segments, np.int64)
        for segment in range(segments.num_segments):
            plan = runs.states_of(segment, slots, 4)
            forks = sum(len(level.forks) for level in plan.levels)
            assert runs.num_states[segment] == len(plan.entry_slots) + 1 + forks
            widest = max((len(level.lengths) for level in plan.levels), default=0)
            assert runs.widest_levels[segment] == widest
            assert step.kept[segment] == STATES.exit * forks
            assert step.work[segment] == STATES.state * (2 * runs.num_states[segment] + 4 * widest)
        assert step.in_flight == STATES.open_fork * runs.forks_in_flight.max(initial=0)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (3, 1), (2, 2)])
def test_stages_of_other_layers_keep_within_the_limit_together(stages: int, chunks: int) -> None:
    """The first virtual stage has no attention, the last one no states."""
    samples, kept, refused = comb(24), [], []
    for available in (3000, 4500, 6000, 9000, 14_000, 200_000):
        shape = shape_of(float(available), stages, chunks)
        of_stages = [StageBytes(EACH, STATES)] * (stages * chunks)
        of_stages[0] = StageBytes(replace(EACH, kv_per_token_and_layer=0.0, attention_share=0.0), STATES)
        of_stages[-1] = StageBytes(EACH)
        shape = replace(shape, memory=replace(shape.memory, stages=tuple(of_stages)))
        try:
            step = plan_step(samples, "dta", StepBudget(8), pipeline=shape)
        except InputError as error:
            refused.append(str(error))
            continue
        kept.append(bool(step.training.kept.all()))
        for stage in range(stages):
            chunks_of_stage = stage_chunks(step.segments, step.training, shape, stage)
            slots = state_slots(step.runs, step.training, stage)
            for chunk, (_, num_slots) in zip(chunks_of_stage, slots, strict=True):
                held = 0.0 if chunk.states is None else chunk.states.in_flight
                assert held == (0.0 if chunk.states is None else STATES.open_fork * num_slots)
            assert stage_peak_bytes(step.segments, step.training, shape, stage) <= available
    assert set(kept) == {True, False}
    assert all("too small on pipeline rank" in message for message in refused)


def test_bytes_of_a_stage_are_those_of_its_own_layers() -> None:
    """Any division of the layers has the bytes of the whole, and layers of one kind have the bytes of that kind."""
    shape, rank = SHAPES["qwen3.5-9b"], RankTensors()
    all_layers, states = SegmentBytes.of_shape(shape, rank), StateBytes.of_shape(shape, 2)
    for bounds in ((0, 5, 6, 32), (0, 3, 7, 32)):
        parts = [range(*part) for part in itertools.pairwise(bounds)]
        sizes = [SegmentBytes.of_shape(shape, rank, part) for part in parts]
        kept = sum(len(part) * of.kept_per_token_and_layer for part, of in zip(parts, sizes, strict=True))
        assert kept == pytest.approx(32 * all_layers.kept_per_token_and_layer)
        slots = sum(of.slot(len(part)) - of.kv_per_token for part, of in zip(parts, sizes, strict=True))
        assert slots == pytest.approx(all_layers.slot(32) - all_layers.kv_per_token)
        of_states = [StateBytes.of_shape(shape, 2, layers=part) for part in parts]
        assert sum(stage_states.exit for stage_states in of_states if stage_states) == states.exit
        assert sum(stage_states.open_fork for stage_states in of_states if stage_states) == states.open_fork
    recurrent, attention = (SegmentBytes.of_shape(shape, rank, part) for part in (range(3), range(3, 4)))
    assert recurrent.slot(3) == recurrent.scores_per_token == recurrent.attention_share == 0.0
    assert recurrent.fixed == attention.fixed
    assert StateBytes.of_shape(shape, 2, layers=range(3, 4)) is None
    assert attention.kv_per_token_and_layer == 4 * all_layers.kv_per_token_and_layer
