"""Segments for pipelines: their size, their counts, and near-ideal utilisation within 1.5 times one stage's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.errors import InputError
from megatron_dta.planning import CostModel, PipelineCosts, SegmentPlan, check_schedule, plan_segments
from megatron_dta.planning.partition import trained_parts
from megatron_dta.planning.pipeline_layers import balanced_shares
from megatron_dta.planning.pipeline_schedule import peak_in_flight
from megatron_dta.planning.pipeline_segments import (
    choose_pipeline,
    ideal_utilisation,
    pipeline_segment_tokens,
    plan_pipeline_segments,
    tokens_of_floor,
)
from megatron_dta.planning.segment_counts import segment_counts
from megatron_dta.rollouts import load_rollouts
from megatron_dta.tree import build_prefix_tree
from partition_cases import turns_forest

MODEL = CostModel.from_shape(64, 5120, 25600, 64, 8, 128, 151936)
SETS = ("gsm8k_openai_4x400", "mint_math_8x100", "swe_openhands_django", "tau1_airline_gpt4o_4x50", "tot_game24_bfs")


@pytest.mark.parametrize("seed", range(8))
def test_counts_against_single_tokens(seed: int) -> None:
    rng = seed_all(seed)
    sequences, masks, _ = turns_forest(rng, 6, 3, 4)
    tree = build_prefix_tree(sequences)
    plan = plan_segments(tree, int(rng.integers(1, 40)))
    expected = np.zeros((3, plan.num_segments), dtype=np.int64)
    of_token = np.repeat(np.arange(plan.num_segments), plan.lengths)
    np.add.at(expected[0], of_token, 1)
    np.add.at(expected[1], of_token, plan.tree.position + 1)
    edges = set()
    for index, mask in enumerate(masks):
        stream = plan.tree.stream_indices(index)
        edges |= {(int(stream[t - 1]), int(stream[t])) for t in np.flatnonzero(mask)}
    for parent, _ in edges:
        expected[2, of_token[parent]] += 1
    np.testing.assert_array_equal(np.stack(segment_counts(plan, masks)), expected)


def test_sizes() -> None:
    assert pipeline_segment_tokens(10**6, 2048, 16384, 1) == 2048
    assert pipeline_segment_tokens(10**6, 2048, 16384, 4) == 1600
    assert pipeline_segment_tokens(10**6, 2048, 16384, 8) == 768
    assert pipeline_segment_tokens(10**6, 2048, 99999, 8) == 2048
    assert pipeline_segment_tokens(16000, 2048, 16384, 8) == 448
    assert pipeline_segment_tokens(10, 2048, 16384, 8) == 256
    assert pipeline_segment_tokens(100, 32, 256, 4) == 25
    assert pipeline_segment_tokens(100, 1, 1, 64) == 1
    # Not below what takes as long as its launches, if half of the budget holds the P - 1 more.
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 700) == 1600
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 2000) == 1984
    assert pipeline_segment_tokens(10**6, 4096, 16384, 4, 9999) == 2688
    assert pipeline_segment_tokens(10**6, 2048, 16384, 4, 9999) == 2048
    assert pipeline_segment_tokens(10, 2048, 16384, 8, 700) == 640
    assert pipeline_segment_tokens(10**6, 4096, 16384, 1, 700) == 4096
    assert (ideal_utilisation(9, 4), ideal_utilisation(0, 4)) == (0.75, 1.0)


def forest(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Trajectories of several turns that share beginnings, some 40,000 tokens."""
    rng = seed_all(seed)
    sequences, masks = [], []
    for _ in range(8):
        trunk = rng.integers(0, 9999, rng.integers(300, 1500))
        for _ in range(6):
            own = rng.integers(0, 9999, rng.integers(100, 2500))
            sequences.append(np.concatenate([trunk[: rng.integers(len(trunk) // 2, len(trunk))], own]).astype(np.int32))
            masks.append(np.arange(len(sequences[-1])) >= len(sequences[-1]) - len(own))
    return sequences, masks


def costs_function(masks: list[np.ndarray], stages: int, chunks: int = 1):
    def costs_of(plan: SegmentPlan) -> PipelineCosts:
        tokens, pairs, edges = segment_counts(plan, masks)
        layers = float(sum(map(np.sum, MODEL.segment_seconds(tokens, pairs, np.zeros_like(edges)))))
        shares = balanced_shares(stages, chunks, layers, output_cost=MODEL.seconds_per_edge * edges.sum())
        return PipelineCosts.of_segments(MODEL, tokens, pairs, edges, shares)

    return costs_of


@pytest.mark.parametrize("stages", [1, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_near_the_ideal_within_the_memory(seed: int, stages: int) -> None:
    sequences, masks = forest(seed)
    tree = build_prefix_tree(sequences)
    plan = choose_pipeline(tree, costs_function(masks, stages), stages)
    check_schedule(plan.schedule, plan.segments.segment_parent)
    assert plan.timeline.utilisation >= 0.95 * plan.ideal_utilisation
    one_stage = plan_segments(tree, 2048).peak_in_flight_tokens
    assert plan.one_stage_tokens == min(one_stage, plan.segments.peak_in_flight_tokens)
    assert max(peak_in_flight(plan.schedule, plan.segments.lengths)) <= 1.5 * plan.one_stage_tokens
    if stages == 1:
        assert plan.segments.segment_tokens == 2048
    else:
        assert plan.segments.segment_tokens <= plan_pipeline_segments(tree, 2048, None, stages).segment_tokens < 2048


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_the_floor_is_the_fastest(seed: int) -> None:
    """With launches that take long, of all sizes that memory allows."""
    sequences, masks = forest(seed)
    tree, slow = build_prefix_tree(sequences), replace(MODEL, floor_seconds=1500 * MODEL.seconds_per_token)

    def costs_of(plan: SegmentPlan) -> PipelineCosts:
        return PipelineCosts.of_segments(slow, *segment_counts(plan, masks), [1.0] * 4)

    assert tokens_of_floor(slow) == 1500
    chosen = choose_pipeline(tree, costs_of, 4, floor_tokens=tokens_of_floor(slow), segment_tokens=4096)
    unaware = choose_pipeline(tree, costs_of, 4, segment_tokens=4096, pipeline_tokens=512)
    assert chosen.segments.segment_tokens > 512
    assert chosen.timeline.makespan < 0.8 * unaware.timeline.makespan
    assert max(peak_in_flight(chosen.schedule, chosen.segments.lengths)) <= 1.5 * chosen.one_stage_tokens


def test_given_sizes_and_limits_are_kept() -> None:
    sequences, masks = forest(5)
    tree = build_prefix_tree(sequences)
    given = choose_pipeline(tree, costs_function(masks, 4), 4, pipeline_tokens=700, max_in_flight_tokens=9000)
    assert given.segments.segment_tokens == 700
    assert given.segments.lengths.max() <= 700
    assert given.limit == 9000
    assert max(peak_in_flight(given.schedule, given.segments.lengths)) <= 9000
    chunks = choose_pipeline(tree, costs_function(masks, 2, 3), 2, 3, segment_tokens=500, split_backward=True)
    assert chunks.segments.lengths.max() <= 500
    assert chunks.schedule.num_chunks == 3
    check_schedule(chunks.schedule, chunks.segments.segment_parent)
    longest = max(map(len, sequences))
    with pytest.raises(InputError, match="--tree-memory-tokens"):
        plan_pipeline_segments(tree, 512, longest - 1, 4)
    with pytest.raises(InputError, match=f"--pipeline-in-flight-tokens {longest - 1} is less than the longest"):
        plan_pipeline_segments(tree, 512, None, 4, longest - 1)
    with pytest.raises(InputError, match=f"--pipeline-in-flight-tokens {longest - 1} is less than the longest"):
        choose_pipeline(tree, costs_function(masks, 4), 4, max_in_flight_tokens=longest - 1)
    for limit in (longest, 2 * longest):
        tight = plan_pipeline_segments(tree, 2048, None, 4, limit)
        assert longest <= tight.peak_in_flight_tokens <= max(longest, limit / 1.5)
    empty = build_prefix_tree([])
    nothing = choose_pipeline(empty, costs_function([], 4), 4)
    assert (nothing.segments.num_segments, nothing.timeline.makespan, nothing.ideal_utilisation) == (0, 0.0, 1.0)


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("name", SETS)
def test_real_sets(name: str, stages: int) -> None:
    sequences, masks = trained_parts(load_rollouts(rollout_file(f"{name}.npz")))
    plan = choose_pipeline(build_prefix_tree(sequences), costs_function(masks, stages), stages)
    peak = max(peak_in_flight(plan.schedule, plan.segments.lengths)) / plan.one_stage_tokens
    share = plan.timeline.utilisation / plan.ideal_utilisation
    print(f"{name}: {plan.segments.num_segments} segments, {share:.4f} of the ideal, {peak:.3f} x one stage's tokens")
    assert share >= 0.95
    assert peak <= 1.5


def test_balanced_shares() -> None:
    for stages, chunks, output in ((4, 1, 3.0), (4, 2, 3.0), (2, 3, 9.0), (3, 1, 100.0), (1, 1, 5.0), (5, 2, 0.0)):
        shares = np.asarray(balanced_shares(stages, chunks, 40.0, 0.5, output))
        assert shares.sum() == pytest.approx(1)
        assert (shares >= 0).all()
        extra = np.zeros(stages * chunks)
        extra[0] += 0.5
        extra[-1] += output
        ranks = [float((40.0 * shares + extra)[rank::stages].sum()) for rank in range(stages)]
        level = max((40.5 + output) / stages, output if stages > 1 else 0)
        assert max(ranks) == pytest.approx(level)
    assert balanced_shares(2, 2, 0.0) == [0.25] * 4
