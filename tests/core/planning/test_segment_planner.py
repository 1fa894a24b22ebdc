"""The segment planner: invariants of every plan, distance from the best plan, results on real rollouts."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from conftest import rollout_file, seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.segments.plan import SegmentPlan, plan_segments, segment_parents
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.tree import PrefixTree, build_prefix_tree
from segment_planner_cases import ROLLOUTS, random_sequences


def budgets(tree: PrefixTree, segment_tokens: int) -> list[int]:
    """The least budget that works, some above it, the default and one that never binds."""
    longest = int(tree.sequence_lengths.max())
    default = max(3 * longest // 2, 8 * segment_tokens)
    return sorted({longest, longest + 1, longest + segment_tokens, default, tree.num_tokens + default})


def check_plan(plan: SegmentPlan, sequences: list[np.ndarray], segment_tokens: int, budget: int) -> None:
    """Everything that holds for every plan, each by the slowest and plainest means."""
    tree = plan.tree
    starts = plan.segment_start.tolist()
    assert starts[0] == 0
    assert starts[-1] == tree.num_tokens
    assert all(0 < end - start <= segment_tokens for start, end in itertools.pairwise(starts))
    assert plan.segment_start.dtype == np.int64
    assert plan.segment_parent.dtype == np.int32
    assert plan.fill == pytest.approx(tree.num_tokens / (plan.num_segments * segment_tokens))

    # The same forest: as many tokens, and every sequence is found in it.
    assert tree.num_tokens == build_prefix_tree(sequences).num_tokens
    for index, sequence in enumerate(sequences):
        np.testing.assert_array_equal(tree.token_ids[tree.stream_indices(index)], sequence)

    # Parents, and keys that are seen: in the own segment, or on the root path of its first token in an ancestor.
    segment_of = np.repeat(np.arange(plan.num_segments), plan.lengths)
    ancestors: list[set[int]] = []
    for segment, first in enumerate(starts[:-1]):
        above = int(tree.parent[first])
        parent = int(segment_of[above]) if above >= 0 else -1
        assert plan.segment_parent[segment] == parent
        ancestors.append({parent} | ancestors[parent] if parent >= 0 else set())
        path = set()
        while above >= 0:
            path.add(above)
            above = int(tree.parent[above])
        for query in range(first, starts[segment + 1]):
            for key in range(query + 1):
                if query < tree.subtree_end[key] and key < first:
                    assert key in path
                    assert int(segment_of[key]) in ancestors[segment]

    check_execution(plan, ancestors, budget)


def check_execution(plan: SegmentPlan, ancestors: list[set[int]], budget: int) -> None:
    """Run the segments forward in order, each backward once its children's are done; see what is in flight."""
    children = [np.flatnonzero(plan.segment_parent == segment).tolist() for segment in range(plan.num_segments)]
    alive: set[int] = set()
    done: set[int] = set()
    for segment in range(plan.num_segments):
        alive.add(segment)
        # In stream order nothing but the path is alive: that is what makes the order a preorder.
        assert alive == ancestors[segment] | {segment}
        in_flight = sum(int(plan.lengths[member]) for member in alive)
        assert in_flight == plan.in_flight_tokens[segment]
        assert in_flight <= budget
        ended = True
        while ended:
            ended = {member for member in alive if all(child in done for child in children[member])}
            alive -= ended
            done |= ended
    assert not alive
    assert plan.peak_in_flight_tokens == max(plan.in_flight_tokens)
    assert plan.depth == max(len(path) + 1 for path in ancestors)


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_random_forests(seed: int) -> None:
    rng = seed_all(seed)
    for _ in range(12):
        sequences = random_sequences(rng, int(rng.integers(1, 12)), int(rng.integers(1, 4)), int(rng.integers(1, 9)))
        tree = build_prefix_tree(sequences)
        segment_tokens = int(rng.integers(1, 10))
        for budget in budgets(tree, segment_tokens):
            check_plan(plan_segments(tree, segment_tokens, budget), sequences, segment_tokens, budget)


def sibling_orders(tree: PrefixTree) -> Iterator[list[int]]:
    """Every preorder of the forest's nodes."""
    children: list[list[int]] = [[] for _ in range(tree.num_nodes + 1)]
    for node, parent in enumerate(tree.node_parent.tolist()):
        children[parent].append(node)

    def below(node: int) -> Iterator[list[int]]:
        for order in itertools.permutations(children[node]):
            for parts in itertools.product(*(list(below(child)) for child in order)):
                yield [node for child, part in zip(order, parts, strict=True) for node in (child, *part)]

    return below(-1)


def fewest_segments(parent: list[int], segment_tokens: int, budget: int) -> int:
    """Fewest segments over all sets of cuts of a stream; more than its tokens if none keeps the budget."""
    count = len(parent)
    best = count + 1
    segment_of = [0] * count
    in_flight: list[int] = []

    def cut(start: int) -> None:
        nonlocal best
        if start == count:
            best = min(best, len(in_flight))
            return
        if len(in_flight) + -(-(count - start) // segment_tokens) >= best:
            return
        above = in_flight[segment_of[parent[start]]] if parent[start] >= 0 else 0
        for end in range(min(count, start + segment_tokens), start, -1):
            if above + end - start <= budget:
                segment_of[start:end] = [len(in_flight)] * (end - start)
                in_flight.append(above + end - start)
                cut(end)
                in_flight.pop()

    cut(0)
    return best


def test_planner_against_all_plans() -> None:
    """Against every sibling order and set of cuts: never better, nearly always as good, feasible when a plan is."""
    planned = best = exact = cases = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        sequences = random_sequences(rng, int(rng.integers(1, 8)), 3, int(rng.integers(1, 6)))
        tree = build_prefix_tree(sequences)
        orders = list(itertools.islice(sibling_orders(tree), 200))
        if len(orders) == 200 or tree.num_tokens > 18:
            continue
        parents = [tree.with_node_order(np.asarray(order)).parent.tolist() for order in orders]
        longest = max(map(len, sequences))
        for segment_tokens in (1, 2, 3, 5):
            assert min(fewest_segments(parent, segment_tokens, longest - 1) for parent in parents) > tree.num_tokens
            for budget in budgets(tree, segment_tokens)[:4]:
                fewest = min(fewest_segments(parent, segment_tokens, budget) for parent in parents)
                assert fewest <= tree.num_tokens, "the longest sequence is a budget that always works"
                segments = plan_segments(tree, segment_tokens, budget).num_segments
                assert segments >= fewest, f"seed {seed}: no plan has {segments} segments"
                planned, best, exact, cases = planned + segments, best + fewest, exact + (segments == fewest), cases + 1
    print(f"{cases} cases, best plan found in {exact / cases:.1%}, segments over the best {planned / best - 1:.2%}")
    assert cases > 200
    assert exact / cases > 0.95
    assert planned / best < 1.01


@pytest.mark.parametrize(
    ("name", "sample_granularity"),
    # The turns of a trajectory are its prefixes, so both have one forest, except where thoughts are left out of later
    # turns.
    [*((name, "trajectory") for name in ROLLOUTS[1::2]), ("mint_math_thinkstrip_perturn", "turn")],
)
def test_goals_on_real_rollouts(name: str, sample_granularity: str) -> None:
    """Fill of at least 0.9 in 1.5 times the longest sequence or 8 segments; least budget kept too."""
    segment_tokens = 2048
    rollouts = load_rollouts(rollout_file(f"{name}.npz"), sample_granularity=sample_granularity)
    tree = build_prefix_tree([rollout.token_ids for rollout in rollouts])
    longest = int(tree.sequence_lengths.max())
    plan = plan_segments(tree, segment_tokens)
    print(f"{name} {sample_granularity}: fill {plan.fill:.3f}, peak {plan.peak_in_flight_tokens}, longest {longest}")
    assert plan.lengths.max() <= segment_tokens
    assert plan.peak_in_flight_tokens <= max(1.5 * longest, 8 * segment_tokens)
    assert plan.fill >= 0.9
    least = plan_segments(tree, segment_tokens, longest)
    assert least.peak_in_flight_tokens == longest
    assert least.lengths.max() <= segment_tokens


def test_budget_below_the_longest_sequence_is_refused() -> None:
    tree = build_prefix_tree([np.arange(10, dtype=np.int32), np.asarray([0, 5], dtype=np.int32)])
    with pytest.raises(InputError, match=r"--tree-memory-tokens 9 .*the least value that works is 10$"):
        plan_segments(tree, 4, 9)
    assert plan_segments(tree, 4, 10).peak_in_flight_tokens == 10


@pytest.mark.parametrize("segment_tokens", [1, 1000])
@pytest.mark.parametrize("shape", ["chain", "leaves", "comb"])
def test_very_deep_and_very_wide(shape: str, segment_tokens: int) -> None:
    """5,000 tokens deep, 4,990 leaves wide, a branch at each of 1,000 depths: no recursion, no quadratic time."""
    if shape == "chain":
        tree = build_prefix_tree([np.arange(5_000, dtype=np.int32)])
    elif shape == "leaves":
        tree = build_prefix_tree([np.asarray([7, leaf], dtype=np.int32) for leaf in range(4_990)])
    else:
        spine = np.zeros(2_000, np.int32)
        tree = build_prefix_tree([np.append(spine[: 2 * tooth], np.int32(1)) for tooth in range(1, 1_001)])
    longest = int(tree.sequence_lengths.max())
    for budget in (None, longest):
        plan = plan_segments(tree, segment_tokens, budget)
        assert plan.segment_start[-1] == tree.num_tokens
        assert plan.lengths.max() <= segment_tokens
        assert plan.peak_in_flight_tokens <= (budget or max(3 * longest // 2, 8 * segment_tokens))
        if budget is None:
            assert plan.fill > 0.98
        np.testing.assert_array_equal(segment_parents(plan.tree, plan.segment_start), plan.segment_parent)
