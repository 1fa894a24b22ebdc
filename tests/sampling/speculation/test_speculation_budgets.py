"""Budgets, length classes, and the stop of degenerate samples, against brute force and by hand."""

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.degenerate import DegenerateDetector
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.lengths import (
    CANDIDATES,
    LengthClass,
    LengthHistory,
    candidate_lengths,
    completion_probability,
)
from megatron_dta.sampling.speculation.speculator import Speculator
from speculation_exact_cases import clockless

CHEAP = ForwardCost(1.0, 1e-9, 0.0, 0.0)


def test_length_classes() -> None:
    history = LengthHistory()
    assert history.first_class("a") == LengthClass.MEDIUM
    assert history.classes(np.array([1, 1]), np.array([5, 10**6])).tolist() == [1, 1]
    for name, lengths in (("short", (10, 12, 14)), ("medium", (100, 110, 120)), ("long", (1000, 1100, 1200))):
        for length in lengths:
            history.add(name, length)
    assert history.first_class("long") == LengthClass.MEDIUM  # not before the step is over
    history.end_step()
    history.add("short", 2000)
    history.end_step()
    names = ("short", "medium", "long", "new")
    assert [history.first_class(name).name for name in names] == ["SHORT", "MEDIUM", "LONG", "MEDIUM"]
    # Those that began short: once longer than a short one can be, the only such sample was long.
    assert history.classes(np.array([0, 0]), np.array([1, 50])).tolist() == [2, 2]
    assert history.classes(np.array([1, 2]), np.array([2000, 1])).tolist() == [2, 2]
    history.add("long", 7)  # of a step that is not over
    restored = LengthHistory()
    restored.load_state_dict(history.state_dict())
    history.end_step(), restored.end_step()
    assert [restored.first_class(name) for name in names] == [history.first_class(name) for name in names]
    pairs = zip(history.state_dict().values(), restored.state_dict().values(), strict=True)
    assert all(np.array_equal(*pair) for pair in pairs)


@pytest.mark.parametrize("share", [0.1, 0.34, 0.95, 1.0])
def test_samples_at_the_cap_are_long(share: float) -> None:
    """However many there are, and the others stay apart from them."""
    rng = seed_all(int(100 * share))
    history, count = LengthHistory(), round(200 * share)
    others = rng.permutation(np.arange(1000, 1000 + 200 - count)).tolist()
    for i in range(count):
        history.add(f"capped {i % 4}", 8192)
    for i, length in enumerate(others):
        history.add(f"other {i}", length)
    history.end_step()
    assert {history.first_class(f"capped {i}") for i in range(4)} == {LengthClass.LONG}
    # One that has reached nearly the cap is expected to be one of them.
    assert history.classes(np.array([LengthClass.MEDIUM]), np.array([8191])).tolist() == [LengthClass.LONG]
    if share >= 0.34:
        assert LengthClass.LONG not in {history.first_class(f"other {i}") for i in range(len(others))}


def candidates_one_by_one(problem_lengths: list[int], others: list[int]) -> np.ndarray:
    """Possible lengths of one sample, from all lengths anew."""
    if not others:
        return np.zeros(CANDIDATES)
    count = round(len(problem_lengths) / (len(problem_lengths) + 2.0) * CANDIDATES)
    of_own = [np.quantile(problem_lengths, (i + 0.5) / count) for i in range(count)]
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
            history.add(problem, length)
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
    problems = [rng.lognormal(np.log(300), 0.3, 6) for _ in range(9)]
    others = np.concatenate(problems)
    candidates = np.stack([candidate_lengths(lengths, others) for lengths in problems])
    so_far, speed = rng.integers(0, 150, 9), rng.uniform(1, 4, 9)
    probability = completion_probability(candidates, so_far, speed)
    ends = np.where(candidates > so_far[:, None], (candidates - so_far[:, None]) / speed[:, None], 0)
    draws = np.stack([rng.choice(row, 40000) for row in ends]) + rng.random((9, 40000)) * 1e-6
    counted = np.bincount(draws.argmax(0), minlength=9) / 40000
    assert probability.sum() == pytest.approx(1)
    assert np.abs(probability - counted).max() < 0.12
    assert probability.argmax() == counted.argmax()
    same = completion_probability(np.repeat(candidates[:1], 5, axis=0), np.full(5, 7), np.ones(5))
    assert np.allclose(same, 0.2)
    unknown = completion_probability(np.zeros((4, CANDIDATES)), np.arange(4), np.ones(4))
    assert np.allclose(unknown, 0.25)
    straggler = np.stack([np.full(CANDIDATES, 50.0)] * 3 + [np.full(CANDIDATES, 5000.0)])
    assert completion_probability(straggler, np.zeros(4), np.ones(4))[3] > 0.95


def taught(budget: str, cost: ForwardCost) -> Speculator:
    """Three problems whose samples are short, medium and long, all of them parts of one text. In the first of two steps
    all begin as medium ones."""
    speculator = Speculator(DrafterParams(depth=32), clockless(cost), budget)
    text = np.arange(1000, 1400)
    for step in range(2):
        for problem, length in (("s", 20), ("m", 80), ("l", 320)):
            for _ in range(4):
                slot = speculator.open(problem, np.array([7]))
                speculator.append(slot, text[:length])
                speculator.finish(slot, length)
        speculator.end_step(step)
    return speculator


def opened(speculator: Speculator, so_far: int) -> np.ndarray:
    slots = np.array([speculator.open(problem, np.array([7])) for problem in "sml"])
    for i in range(so_far):
        proposal = speculator.propose(slots, np.zeros(3, np.int64))
        speculator.record(proposal, np.zeros(3, np.int64), np.full(3, 1000 + i, np.int32), np.arange(4), 1.0)
    speculator._next_plan = 0  # those that follow from the length so far
    return slots


def test_classes_have_their_budgets() -> None:
    speculator = taught("class", CHEAP)
    assert [speculator.history.first_class(p) for p in "sml"] == list(LengthClass)  # short, medium, long
    slots = opened(speculator, 12)
    proposal = speculator.propose(slots, np.full(3, 24))
    # Of a match of 12 tokens as many as the tree has: none for a short one, six for a medium one.
    assert proposal.lengths[:2].tolist() == [0, 6]
    assert proposal.lengths[2] > 12
    # Who is alone among the long ones shares a forward with nobody, the others with all three.
    assert speculator._sharers(slots, 3).tolist() == [3.0, 3.0, 1.0]
    assert speculator._samples["first_class"][slots].tolist() == [0, 1, 2]


def test_who_is_likely_the_last_shares_its_forwards_with_few() -> None:
    """A drafted token that pays for one sample in three, and for the long one long before that."""
    speculator = taught("straggler", ForwardCost(1.0, 1.0, 0.0, 0.0))
    slots = opened(speculator, 12)
    proposal = speculator.propose(slots, np.full(3, 24))
    sharers = speculator._sharers(slots, 3)
    assert sharers[0] > 3 > 1.7 > sharers[2] >= 1
    assert proposal.lengths[2] > proposal.lengths[0]


def stop_by_loops(tokens: np.ndarray) -> int | None:
    for end in range(128, len(tokens) + 1):
        if len(set(tokens[end - 128 : end].tolist())) >= 0.95 * 128:
            return end
        for period in range(1, 65):
            needed = max(256, 4 * period)
            last = tokens[max(0, end - needed) : end]
            if end >= needed and np.array_equal(last[period:], last[:-period]):
                return end
    return None


@pytest.mark.parametrize("kind", ["loop", "noise", "sane"])
def test_degenerate_text_is_stopped(kind: str) -> None:
    rng = seed_all(len(kind))
    sane, block = rng.zipf(1.3, 300) % 400, rng.integers(0, 500, 40)
    tails = {"loop": np.tile(block, 9), "noise": rng.permutation(50000)[:300], "sane": rng.zipf(1.3, 300) % 400}
    tokens = np.concatenate([sane, tails[kind]])
    detector, position, stop = DegenerateDetector(), 0, None
    while stop is None and position < len(tokens):
        piece = tokens[position : position + int(rng.integers(1, 9))]
        at = detector.feed(piece)
        stop = None if at is None else position + at
        position += len(piece)
    assert stop == stop_by_loops(tokens)
    assert (stop is None) == (kind == "sane")
