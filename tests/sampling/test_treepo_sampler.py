"""Trees sampled on a recording engine: contexts, width, weights, order of results, the rule against a slow twin."""

from collections import Counter

import numpy as np
import pytest

from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.budget import branch_budget, certain_branches, divide_by_logprob, divide_evenly
from megatron_dta.sampling.treepo.keys import Decision, QueryNumbers, node_key
from megatron_dta.sampling.treepo.policy import fallback_nodes
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.stops import StopRules, answer_rule, boxed_answer
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree
from recording_engine import RecordingEngine

EOS = 0
ALLOCATIONS = ("even", "low-logprob", "high-logprob")
FALLBACKS = ("random", "finished")


def random_settings(rng: np.random.Generator, **changes) -> TreeSettings:
    first = int(rng.integers(1, 5))
    settings = dict(
        width=int(rng.integers(1, 9)),
        max_response_tokens=int(rng.integers(1, 11)),
        segment_tokens=int(rng.integers(1, 5)) if rng.random() < 0.9 else None,
        branching_factor=int(rng.integers(1, 5)),
        initial_branches=first,
        initial_branches_max=first + int(rng.integers(0, 6)) if rng.random() < 0.4 else None,
        allocation=str(rng.choice(ALLOCATIONS)),
        temperature=float(rng.choice([0.05, 0.5, 2.0])),
        fallback=str(rng.choice(FALLBACKS)),
    )
    return TreeSettings(**(settings | changes))


def random_stops(rng: np.random.Generator) -> StopRules:
    if rng.random() < 0.6:
        return StopRules()
    return StopRules(
        decode=lambda ids: " ".join(20 * str(token) for token in ids),
        answer=answer_rule(r"\b7{20}\b") if rng.random() < 0.5 else None,
    )


def random_queries(rng: np.random.Generator, count: int, vocab: int) -> list[TreeQuery]:
    numbers = rng.choice(10**6, count, replace=False)
    return [TreeQuery(int(n), rng.integers(1, vocab, int(rng.integers(1, 6))).astype(np.int32)) for n in numbers]


def test_every_leaf_was_conditioned_on_what_is_recorded_in_front_of_it():
    """1,000 random queries, fallback and all stops included."""
    rng = np.random.default_rng(0)
    runs = fallbacks = 0
    reasons: Counter[EndReason] = Counter()
    while runs < 1000:
        vocab = int(rng.choice([3, 12, 200]))
        engine = RecordingEngine(
            vocab, float(rng.choice([0.03, 0.2, 0.5])), seed=int(rng.integers(1000)), most_at_once=9
        )
        settings = random_settings(rng, width=int(rng.integers(1, 6)))
        params = SamplingParams(64, EOS, seed=int(rng.integers(100)))
        queries = random_queries(rng, 20, vocab)
        trees = TreeSampler(engine, settings, random_stops(rng)).sample(queries, params, int(rng.integers(100)))
        assert not engine.held
        requests = {request.key: request for request in engine.requests}
        assert len(requests) == len(engine.requests), "two nodes have one key"
        for query, tree in zip(queries, trees, strict=True):
            runs += 1
            assert len(tree.leaves) == settings.width
            for leaf in tree.leaves:
                check_leaf(tree, leaf, query, requests, engine, settings)
                fallbacks += tree.nodes[leaf].fallback
                reasons[tree.nodes[leaf].end] += 1
            assert abs(sum(tree.leaf_weights().values()) - 1) < 1e-12
    assert fallbacks > 300
    assert {EndReason.EOS, EndReason.ANSWER, EndReason.LENGTH} == set(reasons)


def check_leaf(tree: SampledTree, leaf: int, query: TreeQuery, requests, engine: RecordingEngine, settings) -> None:
    """Walks down the recorded tokens of one leaf: at each node they are the engine's prompt, then its answer."""
    tokens = tree.tokens(leaf)
    begin = len(query.token_ids)
    assert np.array_equal(tokens[:begin], query.token_ids)
    for index in tree.lineage(leaf)[1:]:
        node = tree.nodes[index]
        request = requests[node.key]
        result = engine.results[request.request_id]
        assert np.array_equal(request.token_ids, tokens[:begin]), "the engine was given another prefix"
        assert np.array_equal(result.token_ids, tokens[begin : begin + len(node.token_ids)])
        assert np.array_equal(result.logprobs, node.logprobs)
        assert 1 <= len(node.token_ids) <= (settings.segment_tokens or settings.max_response_tokens)
        assert (node.end is None) == (index != leaf)
        assert (EOS in node.token_ids) <= (node.end == EndReason.EOS)
        begin += len(node.token_ids)
    assert begin == len(tokens)
    assert len(tokens) - len(query.token_ids) <= settings.max_response_tokens


def test_the_tree_depends_neither_on_the_order_of_results_nor_on_the_other_queries():
    rng = np.random.default_rng(0)
    for _ in range(30):
        settings, params = random_settings(rng), SamplingParams(64, EOS)
        queries = random_queries(rng, 6, 30)
        together = TreeSampler(RecordingEngine(30, 0.15, seed=1, most_at_once=1), settings).sample(queries, params, 4)
        engine = RecordingEngine(30, 0.15, seed=2, most_at_once=99, tokens_per_poll=1)
        lockstep = TreeSampler(engine, settings).sample(queries[::-1], params, 4)[::-1]
        alone = [TreeSampler(RecordingEngine(30, 0.15), settings).sample([q], params, 4)[0] for q in queries]
        delaying = TreeSampler(RecordingEngine(30, 0.15, seed=3, most_at_once=40), settings)
        delaying.least_results = 2
        for trees in (lockstep, alone, delaying.sample(queries, params, 4)):
            for a, b in zip(together, trees, strict=True):
                assert_same_tree(a, b)


def assert_same_tree(a: SampledTree, b: SampledTree) -> None:
    assert [node.path for node in a.nodes] == [node.path for node in b.nodes]
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert np.array_equal(x.token_ids, y.token_ids)
        assert (x.end, x.fallback, x.round, x.parent, x.children) == (y.end, y.fallback, y.round, y.parent, y.children)


def slow_tree(query: TreeQuery, settings: TreeSettings, engine: RecordingEngine, params, iteration) -> set:
    """The published rule with its barrier, level by level, one token at a time: {(path, tokens of the leaf)}."""
    numbers = QueryNumbers(params, iteration, query.number)
    tree = SampledTree(query.number, query.token_ids)
    stops = StopRules()
    first = settings.initial_branches
    if settings.initial_branches_max is not None:
        draw = numbers.generator(Decision.INITIAL_BRANCHES)
        first = int(draw.integers(first, settings.initial_branches_max + 1))
    forks = [(0, min(first, settings.width), False)]
    finished = number = 0
    while forks:
        live = []
        members = sum(count for _, count, _ in forks)
        for parent, count, fallback in forks:
            for _ in range(count):
                path = (*tree.nodes[parent].path, len(tree.nodes[parent].children))
                node = tree.add_child(parent, fallback, number)
                assert tree.nodes[node].key == node_key(query.number, path)
                prefix, tokens, logprobs = tree.tokens(parent).tolist(), [], []
                tokens_left = settings.max_response_tokens - tree.response_length(parent)
                while len(tokens) < min(tokens_left, settings.segment_tokens or tokens_left) and EOS not in tokens:
                    logprobs.append(engine.logprob_after(prefix + tokens, tree.nodes[node].key))
                    tokens.append(engine.token_after(prefix + tokens, tree.nodes[node].key))
                tree.fill(node, tokens, np.array(logprobs, np.float32), 0)
                ended = tokens[-1] == EOS
                tree.nodes[node].end = stops.end_of(tree, node, ended, settings.max_response_tokens)
                if tree.nodes[node].end is None:
                    live.append(node)
        live.sort(key=lambda index: tree.nodes[index].path)
        done = members - len(live)
        budget = min(max(settings.width - finished - done, 0), settings.branching_factor * members)
        finished += done
        if live:
            budget = max(budget, len(live))
            order = numbers.generator(Decision.REMAINDER, number).permutation(len(live))
            counts = [budget // len(live)] * len(live)
            for branch in order[: budget % len(live)]:
                counts[branch] += 1
            forks = [(node, count, False) for node, count in zip(live, counts, strict=True)]
        else:
            missing = settings.width - finished if settings.fallback != "none" else 0
            draw = numbers.generator(Decision.FALLBACK, number)
            forks = [(node, 1, True) for node in fallback_nodes(tree, tree.leaves, missing, settings, draw)]
        number += 1
    return {(tree.nodes[leaf].path, tuple(tree.tokens(leaf).tolist()), tree.nodes[leaf].end) for leaf in tree.leaves}


@pytest.mark.parametrize("seed", range(2))
def test_equals_the_rule_with_its_barrier(seed: int):
    rng = np.random.default_rng(50 + seed)
    for _ in range(40):
        settings = random_settings(rng, allocation="even", fallback=str(rng.choice(("none", *FALLBACKS))))
        engine, params = RecordingEngine(20, 0.12, seed=seed), SamplingParams(64, EOS, seed=seed)
        queries = random_queries(rng, 3, 20)
        trees = TreeSampler(engine, settings).sample(queries, params, 1)
        for query, tree in zip(queries, trees, strict=True):
            leaves = {
                (tree.nodes[leaf].path, tuple(tree.tokens(leaf).tolist()), tree.nodes[leaf].end) for leaf in tree.leaves
            }
            assert leaves == slow_tree(query, settings, engine, params, 1)


@pytest.mark.parametrize(("fallback", "early"), [("random", 12), ("finished", 0)])
def test_a_certain_fallback_starts_with_the_round_before_it(fallback: str, early: int):
    """Two paths and then four, which have the maximum length with their second segment: 12 of 16 leaves are missing."""
    settings, engine = TreeSettings(16, 40, 20, fallback=fallback), RecordingEngine(100, seed=1, most_at_once=1)
    TreeSampler(engine, settings).sample([TreeQuery(0, np.array([5]))], SamplingParams(40, EOS), 0)
    third = [at for at, (name, _) in enumerate(engine.calls) if name == "finish"][2]
    assert sum(name == "submit" for name, _ in engine.calls[:third]) == 2 + 4 + early


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_path_forks_the_moment_it_ends_its_segment(lockstep: bool):
    """One result a poll: a living path's first child follows it at once, and all its children if its round is known."""
    settings = TreeSettings(16, 40, segment_tokens=2)
    engine = RecordingEngine(100, 0.0, seed=1, most_at_once=1, tokens_per_poll=1 if lockstep else None)
    tree = TreeSampler(engine, settings).sample([TreeQuery(0, np.array([5]))], SamplingParams(40, EOS), 0)[0]
    by_key = {node.key: index for index, node in enumerate(tree.nodes)}
    node_of = {request.request_id: by_key[request.key] for request in engine.requests}
    reported: Counter[int] = Counter()
    members = Counter(node.round for node in tree.nodes[1:])
    for at, (name, request) in enumerate(engine.calls):
        node = tree.nodes[node_of[request]]
        if name != "finish":
            continue
        known = all(reported[number] == members[number] for number in range(node.round))
        reported[node.round] += 1
        if node.children:
            following = [node_of[r] for n, r in engine.calls[at + 1 : at + 1 + len(node.children)] if n == "submit"]
            assert node.children[0] in following
            assert not known or sorted(following) == sorted(node.children)
    parents = {request.request_id: request.parent for request in engine.requests}
    assert all(parents[r] is not None for r, node in node_of.items() if len(tree.nodes[node].path) > 1)


def test_budgets():
    """What is certain never exceeds what comes out in the end, over all orders of finishing; no path is cut off."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        width = int(rng.integers(1, 40))
        before = int(rng.integers(0, width))
        members = int(rng.integers(1, width - before + 1))
        factor = int(rng.integers(1, 6))
        finished = int(rng.integers(0, members))
        settings = TreeSettings(width, 100, branching_factor=factor)
        budget = branch_budget(settings, before, members, finished)
        alive = members - finished
        assert alive <= budget <= width - before - finished
        for known in range(finished + 1):
            assert certain_branches(settings, before, members, known) <= budget // alive
        order = rng.permutation(alive)
        even = divide_evenly(budget, order)
        assert even.sum() == budget
        assert even.max() - even.min() <= 1
        scores, temperature = rng.normal(size=alive) * 3, float(rng.choice([0.1, 1.0, 50.0]))
        for prefer_low in (False, True):
            by_logprob = divide_by_logprob(budget, scores, temperature, prefer_low, order)
            assert by_logprob.sum() == budget
            assert by_logprob.min() >= 1
            sorted_scores = by_logprob[np.argsort(scores)]
            assert (np.diff(sorted_scores if not prefer_low else sorted_scores[::-1]) >= 0).all()


def test_text_rules():
    assert boxed_answer(r"so \boxed{\frac{1}{2}} and \boxed {3") == r"\frac{1}{2}"
    assert boxed_answer("boxed{3}") is None


@pytest.mark.parametrize("fallback", FALLBACKS)
def test_nodes_to_which_fallback_may_return_are_held(fallback: str):
    """Each request but the first of a query has a parent, so that its prefix need not be computed again."""
    settings = TreeSettings(8, 8, segment_tokens=2, fallback=fallback)
    engine = RecordingEngine(4, 0.2, seed=3)
    trees = TreeSampler(engine, settings).sample(
        random_queries(np.random.default_rng(4), 20, 4), SamplingParams(64, EOS), 0
    )
    assert sum(node.fallback for tree in trees for node in tree.nodes) > 20
    assert sum(request.parent is None for request in engine.requests) == len(trees) * settings.initial_branches
