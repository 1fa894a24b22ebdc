"""Budgets, costs, calibration, length classes and the stop against brute force and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.common.errors import InputError
from megatron_dta.speculation.budgets import (
    BudgetParams,
    LengthClass,
    LengthHistory,
    class_bounds,
    drafted_tokens,
    fit_acceptance,
    gate,
    optimal_budget,
)
from megatron_dta.speculation.calibration import AcceptanceTable
from megatron_dta.speculation.completion_probability import CANDIDATES, candidate_lengths, completion_probability
from megatron_dta.speculation.degenerate import DegenerateDetector, degenerate_length
from megatron_dta.speculation.drafter import Drafter, DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.speculator import Speculator


@pytest.mark.parametrize("seed", range(6))
def test_optimal_budget_is_the_brute_force_minimum(seed: int) -> None:
    rng = seed_all(seed)
    n = int(rng.integers(1, 80))
    lengths, alpha = rng.lognormal(7, 1, n) + 1, rng.uniform(0.2, 5, n)
    k = rng.uniform(0, 1, n) if seed % 2 else np.ones(n)
    c_base, c_tok = 12e-3, float(10 ** rng.uniform(-6, -2))

    def total(forwards: float) -> float:
        return c_base * forwards + c_tok * drafted_tokens(lengths, k, alpha, forwards).sum()

    forwards, tokens = optimal_budget(lengths, k, alpha, c_base, c_tok)
    low, high = (lengths * (1 - k)).max(), lengths.max()
    grid = low + (high - low) * np.linspace(1e-9, 1, 20001) ** 2
    best = min(total(f) for f in grid)
    assert total(forwards) <= best * (1 + 1e-6)
    assert total(forwards) == pytest.approx(best, rel=2e-3)
    # What is drafted reaches the forwards: A(p) = k l (1 - exp(-a p / l)).
    gained = k * lengths * (1 - np.exp(-alpha * tokens / lengths))
    assert (lengths - gained <= forwards * (1 + 1e-9)).all()
    assert (tokens[lengths <= forwards] == 0).all()


def test_optimal_budget_of_the_published_example() -> None:
    """64 requests of 12 ms forwards and 20 us tokens: the paper's closed form, which has k in the wrong place, costs
    more than the corrected one for every k below 1."""
    rng = seed_all(0)
    lengths, k, alpha = rng.lognormal(8, 0.8, 64), np.full(64, 0.8), np.full(64, 1.0)
    forwards, tokens = optimal_budget(lengths, k, alpha, 12e-3, 20e-6)

    def seconds(tokens: np.ndarray) -> float:
        reached = (lengths - k * lengths * (1 - np.exp(-alpha * tokens / lengths))).max()
        return 12e-3 * reached + 20e-6 * tokens.sum()

    shares = np.maximum(0, 1 - np.linspace(lengths.max() * 0.01, lengths.max(), 2000)[:, None] / lengths)
    paper = -(lengths / alpha) * np.log(1 - k * shares)
    assert seconds(tokens) < min(seconds(p) for p in paper)
    assert seconds(tokens) < 0.6 * seconds(np.zeros(64))
    assert seconds(tokens) == pytest.approx(12e-3 * forwards + 20e-6 * tokens.sum(), rel=1e-6)


@pytest.mark.parametrize("bad", [([0.0], [0.5], [1.0]), ([1.0], [1.5], [1.0]), ([1.0], [0.5], [0.0]), ([], [], [])])
def test_optimal_budget_refuses(bad) -> None:
    with pytest.raises(ValueError, match="must be"):
        optimal_budget(*map(np.array, bad), 1.0, 1.0)


def test_fit_of_acceptance_finds_what_made_the_data() -> None:
    rng = seed_all(1)
    lengths = rng.uniform(100, 2000, 300)
    drafted = lengths * rng.uniform(0, 3, 300)
    accepted = 0.7 * lengths * (1 - np.exp(-1.4 * drafted / lengths))
    k, alpha = fit_acceptance(lengths, drafted, accepted)
    assert k == pytest.approx(0.7, abs=0.03)
    assert alpha == pytest.approx(1.4, rel=0.08)
    assert fit_acceptance(lengths, np.zeros(300), np.zeros(300)) == (0.5, 1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("knee", [0.0, 37.0])
def test_gate_by_loops(seed: int, knee: float) -> None:
    rng = seed_all(seed)
    n, width = 23, 6
    cost = ForwardCost(8e-3, 3e-4, knee)
    accept = np.minimum.accumulate(rng.choice([1.0, 0.9, 0.5, 0.3, 0.05], (n, width)), axis=1)
    allowed, live = rng.integers(0, width + 1, n), n + 4
    sharers = rng.uniform(1, 60, n)
    lengths = gate(accept, allowed, cost, live, sharers)
    free = sorted((-accept[i, j], i, j) for i in range(n) for j in range(allowed[i]))[: max(0, int(knee) - live)]
    for i in range(n):
        threshold = cost.per_token / (cost.per_token + cost.base / sharers[i])
        paid = 0
        while paid < allowed[i] and accept[i, paid] >= threshold:
            paid += 1
        assert lengths[i] == max(paid, sum(row == i for _, row, _ in free))
    for live, theta in ((16, 0.06), (64, 0.19), (256, 0.49), (512, 0.66)):
        row = np.linspace(0.99, 0.01, 99)[None]
        linear = ForwardCost(8e-3, 3e-5)
        assert row[0, gate(row, np.array([99]), linear, live)[0] - 1] == pytest.approx(theta, abs=0.02)


def test_fit_of_a_forwards_cost() -> None:
    rng = seed_all(3)
    counts = np.repeat([1, 8, 32, 64, 128, 200, 256, 384, 512, 1024], 5)
    for truth in (ForwardCost(7e-3, 2e-5, 0.0), ForwardCost(6e-3, 3e-5, 200.0), ForwardCost(5e-3, 0.0, 0.0)):
        seconds = truth.seconds(counts) * rng.normal(1, 0.01, len(counts))
        fitted = ForwardCost.fit(counts, seconds)
        assert np.allclose(fitted.seconds(counts), truth.seconds(counts), rtol=0.02)
    for tokens, seconds in (([1, 2], [1, 1]), ([1, 2, 3], [1, 0, 1]), ([1, 2, 3], [1, np.nan, 1])):
        with pytest.raises(InputError):
            ForwardCost.fit(np.array(tokens), np.array(seconds))


def test_calibration_learns_the_truth() -> None:
    """Tokens whose tree says 1.0 but that are right 70 times of 100, each given the one before."""
    rng = seed_all(2)
    table = AcceptanceTable()
    matches, supports, ones = np.full(500, 5), np.ones(500, int), np.ones((500, 8))
    for _ in range(20):
        accepted = (rng.random((500, 8)) < 0.7).cumprod(axis=1).sum(axis=1)
        table.update(matches, supports, ones, np.full(500, 8), accepted)
    learned = table.probabilities(matches[:1], supports[:1], ones[:1])[0]
    assert np.allclose(learned[:2], 0.7 ** np.arange(1, 3), atol=0.03)
    assert (np.diff(learned) <= 0).all()
    # Longer drafts are judged by all their positions, so none is believed more than what came in front of it.
    other = table.probabilities(np.array([20]), np.array([9]), ones[:1])[0]
    assert not np.allclose(other, learned)
    restored = AcceptanceTable()
    restored.load_state_dict(table.state_dict())
    assert np.array_equal(restored.probabilities(matches, supports, ones), table.probabilities(matches, supports, ones))


def test_length_classes() -> None:
    history = LengthHistory()
    assert history.first_class("a") == LengthClass.MEDIUM
    assert history.classes(np.array([1, 1]), np.array([5, 10**6])).tolist() == [1, 1]
    for length in (10, 12, 14):
        history.add("short", history.first_class("short"), length)
    for length in (100, 110, 120):
        history.add("medium", history.first_class("medium"), length)
    for length in (1000, 1100, 1200):
        history.add("long", history.first_class("long"), length)
    history.add("short", LengthClass.SHORT, 2000)
    assert history.first_class("long") == LengthClass.MEDIUM  # not before the step is over
    history.end_step()
    names = ("short", "medium", "long", "new")
    assert [history.first_class(name).name for name in names] == ["SHORT", "MEDIUM", "LONG", "MEDIUM"]
    # Those that began short: once longer than a short one can be, the only such sample was long.
    assert history.classes(np.array([0, 0]), np.array([1, 50])).tolist() == [2, 2]
    assert history.classes(np.array([1, 2]), np.array([2000, 1])).tolist() == [2, 2]
    restored = LengthHistory()
    restored.load_state_dict(history.state_dict())
    assert [restored.first_class(name) for name in names] == [history.first_class(name) for name in names]


@pytest.mark.parametrize("share", [0.1, 0.2, 0.34, 0.5, 0.7, 0.95, 1.0])
def test_samples_at_the_cap_are_long(share: float) -> None:
    """However many there are, and the others stay apart from them."""
    rng = seed_all(int(100 * share))
    history, count = LengthHistory(), round(200 * share)
    others = rng.permutation(np.arange(1000, 1000 + 200 - count)).tolist()
    for i in range(count):
        history.add(f"capped {i % 4}", LengthClass.MEDIUM, 8192)
    for i, length in enumerate(others):
        history.add(f"other {i}", LengthClass.MEDIUM, length)
    history.end_step()
    assert {history.first_class(f"capped {i}") for i in range(4)} == {LengthClass.LONG}
    # One that has reached nearly the cap is expected to be one of them.
    assert history.classes(np.array([LengthClass.MEDIUM]), np.array([8191])).tolist() == [LengthClass.LONG]
    if share >= 0.34:
        assert LengthClass.LONG not in {history.first_class(f"other {i}") for i in range(len(others))}
    restored = LengthHistory()
    restored.load_state_dict(history.state_dict())
    assert restored.first_class("capped 0") == LengthClass.LONG


@pytest.mark.parametrize("seed", range(5))
def test_bounds_of_length_classes(seed: int) -> None:
    """Thirds where lengths differ; of ties, one class each: none of many short ones is long beside longer ones."""
    rng = seed_all(seed)
    shares = [np.bincount(np.searchsorted(class_bounds(own), own, side="right"), minlength=3) / len(own)
              for own in (rng.permutation(3000)[:301], rng.lognormal(7, 1, 301).astype(int))]  # fmt: skip
    np.testing.assert_allclose(shares, 1 / 3, atol=0.02)
    tied = np.concatenate([np.full(70, 20), rng.integers(21, 3000, 30)])
    medium, long = class_bounds(tied)
    assert long == 21
    assert medium <= 21
    assert class_bounds(np.full(9, 50)) == (50, 50)


def candidates_one_by_one(own: list[int], others: list[int]) -> np.ndarray:
    """Possible lengths of one sample, from all lengths anew."""
    if not others:
        return np.zeros(CANDIDATES)
    count = round(len(own) / (len(own) + 2.0) * CANDIDATES)
    of_own = [np.quantile(own, (i + 0.5) / count) for i in range(count)]
    if count > 1:
        of_own = np.array(of_own) * np.geomspace(0.8, 1.25, count)
    rest = CANDIDATES - count
    return np.sort(np.concatenate([of_own, [np.quantile(others, (i + 0.5) / rest) for i in range(rest)]]))


@pytest.mark.parametrize("seed", range(3))
def test_possible_lengths_of_samples_follow_the_steps(seed: int) -> None:
    """The same as from all lengths anew for every sample, before and after steps end and where a state is restored."""
    rng = seed_all(seed)
    history, all_lengths, of_problem = LengthHistory(), [], {}
    for _ in range(5):
        new = [(f"p{rng.integers(0, 9)}", int(rng.lognormal(5, 1)) + 1) for _ in range(int(rng.integers(1, 60)))]
        for problem, length in new:
            asked = f"p{rng.integers(0, 12)}"
            expected = candidates_one_by_one(of_problem.get(asked, []), all_lengths)
            np.testing.assert_allclose(history.expected(asked)[1], expected, rtol=1e-12)
            history.add(problem, 1, length)
        history.end_step()
        for problem, length in sorted(new):
            of_problem[problem] = [*of_problem.get(problem, []), length][-64:]
            all_lengths.append(length)
    restored = LengthHistory()
    restored.expected("p0")
    restored.load_state_dict(history.state_dict())
    for name in [f"p{number}" for number in range(12)]:
        expected = candidates_one_by_one(of_problem.get(name, []), all_lengths)
        np.testing.assert_allclose(restored.expected(name)[1], expected, rtol=1e-12)


def test_who_is_last() -> None:
    """Against drawing ends at random; equal samples share, a certain straggler takes all."""
    rng = seed_all(5)
    own = [rng.lognormal(np.log(300), 0.3, 6) for _ in range(9)]
    others = np.concatenate(own)
    candidates = np.stack([candidate_lengths(lengths, others) for lengths in own])
    so_far, speed = rng.integers(0, 150, 9), rng.uniform(1, 4, 9)
    found = completion_probability(candidates, so_far, speed)
    ends = np.where(candidates > so_far[:, None], candidates, np.nan)
    ends = (ends - so_far[:, None]) / speed[:, None]
    ends = np.where(np.isnan(ends), 0, ends)
    draws = np.stack([rng.choice(row, 40000) for row in ends]) + rng.random((9, 40000)) * 1e-6
    counted = np.bincount(draws.argmax(0), minlength=9) / 40000
    assert found.sum() == pytest.approx(1)
    assert np.abs(found - counted).max() < 0.12
    assert found.argmax() == counted.argmax()
    same = completion_probability(np.repeat(candidates[:1], 5, axis=0), np.full(5, 7), np.ones(5))
    assert np.allclose(same, 0.2)
    unknown = completion_probability(np.zeros((4, CANDIDATES)), np.arange(4), np.ones(4))
    assert np.allclose(unknown, 0.25)
    straggler = np.stack([np.full(CANDIDATES, 50.0)] * 3 + [np.full(CANDIDATES, 5000.0)])
    assert completion_probability(straggler, np.zeros(4), np.ones(4))[3] > 0.95


@pytest.mark.parametrize("seed", range(8))
def test_stop_by_scan_and_by_token(seed: int) -> None:
    rng = seed_all(seed)
    sane = rng.zipf(1.3, 700) % 400
    block = rng.integers(0, 500, rng.integers(1, 65))
    tails = {"loop": np.tile(block, 600)[:900], "noise": rng.permutation(50000)[:400], "sane": rng.zipf(1.3, 400) % 400}
    for kind, tail in tails.items():
        tokens = np.concatenate([sane, tail])
        end, detector, position, found = degenerate_length(tokens), DegenerateDetector(), 0, None
        while found is None and position < len(tokens):
            piece = tokens[position : position + int(rng.integers(1, 9))]
            at = detector.feed(piece)
            found = None if at is None else position + at
            position += len(piece)
        assert found == end
        assert (end is None) == (kind == "sane")
        assert end is None or 700 < end < 700 + 400


def rollout(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 9, n).astype(np.int32)


@pytest.mark.parametrize("max_tokens", [700, 260])
def test_window_budget_and_state_of_the_drafter(max_tokens: int) -> None:
    """Of six steps with one, two, three samples; the smaller budget holds fewer than those of the window."""
    rng = seed_all(7)
    drafter = Drafter(DrafterParams(depth=6, early_depth=2, window=3, max_tokens=max_tokens))
    prompts = {name: rollout(rng, 5) for name in "abc"}
    empty = drafter._forest.num_nodes
    for step in range(6):
        for name in "abc"[: 1 + step % 3]:
            sample = drafter.open(name, prompts[name])
            tokens = rollout(rng, 50)
            drafter.extend(np.array([sample], np.uint32), tokens, np.array([0, 50]))
            drafter.finish(sample, step)
        drafter.end_step(step)
        assert drafter.stored_tokens <= max_tokens
        steps = [entry.step for entry in drafter._samples.values()]
        if max_tokens == 700:
            assert set(steps) == {each for each in (step - 2, step - 1, step) if each >= 0}
        else:
            # The oldest left first: what stays are the last ones, and one more would have been too many.
            assert steps == sorted(each for each in range(step + 1) for _ in range(1 + each % 3))[-len(steps) :]
            assert drafter.stored_tokens > 260 - 2 * 60 or len(steps) == sum(1 + each % 3 for each in range(step + 1))
    running = drafter.open("a", prompts["a"])
    restored = Drafter(drafter.params)
    restored.load_state_dict(drafter.state_dict())
    again = restored.open("a", prompts["a"])
    most = np.array([5], np.int32)
    one, two = drafter.draft(np.array([running]), most), restored.draft(np.array([again]), most)
    assert all(np.array_equal(a, b) for a, b in zip(vars(one).values(), vars(two).values(), strict=True))
    assert one.lengths[0] > 0
    assert drafter.stored_tokens == restored.stored_tokens
    drafter.discard(running)
    drafter.end_step(99)
    assert (drafter.num_samples, drafter.stored_tokens, drafter._forest.num_nodes) == (0, 0, empty)
    state = restored.state_dict()
    with pytest.raises(ValueError, match="damaged"):
        restored.load_state_dict(state | {"lengths": state["lengths"][:-1]})


def test_speculator_restored_and_repeated_proposes_alike() -> None:
    """Two of them given the same calls, one saved and loaded between the steps."""
    rng = seed_all(9)
    params = DrafterParams(depth=8, early_depth=2), BudgetParams(exploration=0.1), ForwardCost(8e-3, 1e-4)
    both = [Speculator(*params), Speculator(*params)]
    prompts = [rollout(rng, 4) for _ in range(5)]
    drafted = 0
    for step in range(4):
        slots = [np.array([s.open(str(i % 5), prompts[i % 5], i) for i in range(20)]) for s in both]
        for _ in range(12):
            proposals = [s.propose(own, np.full(20, 9)) for s, own in zip(both, slots, strict=True)]
            assert np.array_equal(proposals[0].lengths, proposals[1].lengths)
            taken = np.arange(proposals[0].tokens.shape[1]) < proposals[0].lengths[:, None]
            assert np.array_equal(proposals[0].tokens[taken], proposals[1].tokens[taken])
            drafted += proposals[0].lengths.sum()
            accepted = rng.integers(0, proposals[0].lengths + 1)
            offsets = np.concatenate([[0], np.cumsum(accepted + 1)])
            tokens = rng.integers(0, 3, offsets[-1]).astype(np.int32)
            for speculator, proposal in zip(both, proposals, strict=True):
                speculator.record(proposal, accepted, tokens, offsets, 1.0)
        for speculator, own in zip(both, slots, strict=True):
            for slot in own.tolist():
                speculator.finish(slot)
            report = speculator.end_step(step)
            assert sum(report.drafted) >= sum(report.accepted) >= 0
        state = both[1].state_dict()
        both[1] = Speculator(*params)
        both[1].load_state_dict(state)
    assert drafted > 100
