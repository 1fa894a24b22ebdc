"""What is drafted for whom: trees by problem and of all, length classes, the optimal budget, costs that ranks share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.config import ParallelConfig
from megatron_dta.sampling.engines.in_process.drafting import SuffixDrafting
from megatron_dta.sampling.engines.interface import GenerationRequest, generate
from megatron_dta.speculation.budgets import BudgetParams, LengthClass, optimal_budget
from megatron_dta.speculation.calibration import AcceptanceTable
from megatron_dta.speculation.drafter import Drafter, DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.gate import SpeculationGate
from megatron_dta.speculation.speculator import Speculator
from mesh_worker import run_on_ranks
from rollout_forest import NEVER, started
from sampling_cases import make_model
from speculation_exact_cases import suffix_drafting

CHEAP = ForwardCost(1.0, 1e-9, 0.0, 0.0)


def told(drafter: Drafter, problem: str, prompt: np.ndarray, tokens: np.ndarray) -> int:
    sample = drafter.open(problem, prompt)
    drafter.extend(np.array([sample], np.uint32), tokens.astype(np.int32), np.array([0, len(tokens)]))
    return sample


@pytest.mark.parametrize("all_problems", [True, False])
def test_another_problem_helps_where_there_is_a_tree_of_all(all_problems: bool) -> None:
    rng = seed_all(3)
    drafter = Drafter(DrafterParams(depth=12, all_problems=all_problems))
    phrase, own = rng.permutation(1000)[:30], rng.permutation(1000)[:30] + 1000
    drafter.finish(told(drafter, "one", np.array([5000]), phrase), 0)
    drafter.finish(told(drafter, "two", np.array([5001]), own), 0)
    new = told(drafter, "two", np.array([5002]), phrase[:10])
    drafts = drafter.draft(np.array([new]), np.array([4]))
    assert drafts.lengths[0] == (4 if all_problems else 0)
    if all_problems:
        assert drafts.tokens[0, :4].tolist() == phrase[10:14].tolist()
        assert drafts.trees[0] == 1
    # Of its own tree first.
    again = told(drafter, "two", np.array([5003]), own[:10])
    drafts = drafter.draft(np.array([again]), np.array([4]))
    assert drafts.tokens[0, :4].tolist() == own[10:14].tolist()
    assert drafts.trees[0] == 0


def test_branches_of_a_tree_are_one_problem() -> None:
    """Forks of forks, of two roots with the same context and one with another."""
    drafting = suffix_drafting()
    engine = started(make_model(3), NEVER, drafting=drafting)
    contexts = [np.array([1, 2, 3], np.int32)] * 2 + [np.array([4, 5], np.int32)]
    roots = [GenerationRequest(i, context, 6, i, hold=True) for i, context in enumerate(contexts)]
    texts = [[*r.token_ids, *f.token_ids] for r, f in zip(roots, generate(engine, roots), strict=True)]
    for generation in (10, 20):
        forks = [
            GenerationRequest(generation + i, np.array(text[: len(text) - i], np.int32), 5, i, parent=parent, hold=True)
            for i, (parent, text) in enumerate(zip((0, 1, 2) if generation == 10 else (10, 11, 12), texts, strict=True))
        ]
        texts = [[*r.token_ids, *f.token_ids] for r, f in zip(forks, generate(engine, forks), strict=True)]
    state = drafting.speculator.drafter.state_dict()
    assert len(state["problems"]) == 2
    of_samples = state["problem"][int(state["num_prompts"]) :]
    assert sorted(np.bincount(of_samples).tolist()) == [3, 6]
    # What a branch has from its parent is in the trees once: two prompts.
    assert int(state["num_prompts"]) == 2


def test_a_restored_speculator_goes_on_with_the_step() -> None:
    rng = seed_all(4)
    params = DrafterParams(window=2), BudgetParams(), CHEAP

    def sample(speculator: Speculator) -> None:
        slot = speculator.open("one", np.array([1, 2]), 0)
        speculator.append(slot, rng.integers(0, 9, 20))
        speculator.finish(slot, 20)

    first = Speculator(*params)
    for step in range(5):
        sample(first)
        first.end_step(step)
    second = Speculator(*params)
    second.load_state_dict(first.state_dict())
    sample(second)
    assert second.drafter.state_dict()["steps"].tolist() == [3, 4, 5]
    second.end_step(5)
    assert second.drafter.state_dict()["steps"].tolist() == [4, 5]


def taught(budget: str, cost: ForwardCost) -> Speculator:
    """Three problems whose samples are short, medium and long, all of them parts of one text. In the first of two steps
    all begin as medium ones."""
    speculator = Speculator(DrafterParams(depth=32), BudgetParams(budget, exploration=0.0), cost)
    text = np.arange(1000, 1400)
    for step in range(2):
        for problem, length in (("s", 20), ("m", 80), ("l", 320)):
            for key in range(4):
                slot = speculator.open(problem, np.array([7]), key)
                speculator.append(slot, text[:length])
                speculator.finish(slot, length)
        speculator.end_step(step)
    return speculator


def opened(speculator: Speculator, so_far: int) -> np.ndarray:
    slots = np.array([speculator.open(problem, np.array([7]), i) for i, problem in enumerate("sml")])
    begun = [np.arange(1000, 1000 + so_far, dtype=np.int32)] * 3
    for i in range(so_far):
        proposal = speculator.propose(slots, np.zeros(3, np.int64))
        tokens = np.array([own[i] for own in begun], np.int32)
        speculator.record(proposal, np.zeros(3, np.int64), tokens, np.arange(4), 1.0)
    speculator._next_plan = 0  # those that follow from the length so far
    return slots


def test_classes_have_their_budgets() -> None:
    speculator = taught("class", CHEAP)
    firsts = [speculator.history.first_class(p) for p in "sml"]
    assert firsts == [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG]
    slots = opened(speculator, 12)
    proposal = speculator.propose(slots, np.full(3, 24))
    # Of a match of 12 tokens as many as the tree has: none for a short one, six for a medium one.
    assert proposal.lengths[:2].tolist() == [0, 6]
    assert proposal.lengths[2] > 12
    # Who is alone among the long ones shares a forward with nobody, the others with all three.
    assert speculator._sharers(slots, 3).tolist() == [3.0, 3.0, 1.0]
    for slot in slots.tolist():
        speculator.finish(slot)
    assert speculator.report.classes == [LengthClass.SHORT, LengthClass.MEDIUM, LengthClass.LONG]


@pytest.mark.parametrize("capped", [2, 3, 5, 7, 10])
def test_capped_samples_are_drafted_for_by_class(capped: int) -> None:
    """A problem whose samples all ran into the cap, among ten of which ``capped`` are like it."""
    speculator = Speculator(DrafterParams(depth=32), BudgetParams("class", exploration=0.0), CHEAP)
    text = np.arange(1000, 1400)
    for problem in range(10):
        for key in range(4):
            slot = speculator.open(f"p{problem}", np.array([7]), key)
            speculator.append(slot, text[: 320 if problem < capped else 40 + 8 * problem + key])
            speculator.finish(slot, 320 if problem < capped else 40 + 8 * problem + key)
    speculator.end_step(0)
    slot = np.array([speculator.open("p0", np.array([7]), 0)])
    speculator.append(slot[0], text[:12].astype(np.int32))
    assert speculator.propose(slot, np.array([24])).lengths[0] > 6


def test_who_is_likely_the_last_shares_its_forwards_with_few() -> None:
    """A drafted token that pays for one sample in three, and for the long one long before that."""
    speculator = taught("straggler", ForwardCost(1.0, 1.0, 0.0, 0.0))
    slots = opened(speculator, 12)
    proposal = speculator.propose(slots, np.full(3, 24))
    sharers = speculator._sharers(slots, 3)
    assert sharers[0] > 3 > 1.7 > sharers[2] >= 1
    assert proposal.lengths[2] > proposal.lengths[0]


def test_estimates_follow_the_policy() -> None:
    """What was nearly always right ten steps ago and is wrong now is soon known to be wrong."""
    table = AcceptanceTable()
    matches, supports, ones = np.full(500, 5), np.ones(500, int), np.ones((500, 4))
    table.update(matches, supports, ones, np.full(500, 4), np.full(500, 4))
    assert table.probabilities(matches[:1], supports[:1], ones[:1])[0, 0] > 0.95
    for _ in range(10):
        table.end_step()
    table.update(matches[:20], supports[:20], ones[:20], np.full(20, 4), np.zeros(20, int))
    assert table.probabilities(matches[:1], supports[:1], ones[:1])[0, 0] < 0.2


@pytest.mark.parametrize("per_token", [1e-3, 0.05, 0.4, 3.0])
def test_the_optimal_budget_is_spread_over_the_forwards(per_token: float) -> None:
    cost = ForwardCost(1.0, per_token, 0.0, 0.0)
    speculator = taught("optimal", cost)
    slots = opened(speculator, 12)
    speculator.propose(slots, np.full(3, 24))
    expected = np.array([speculator.history.candidates(p).mean() for p in "sml"])
    left = np.maximum(expected, 1.25 * 12 + 16) - 12
    k, alpha = (np.full(3, value) for value in speculator._acceptance)
    forwards, tokens = optimal_budget(left, k, alpha, cost.base, cost.per_token)
    caps = np.clip(np.ceil(tokens / forwards), 0, 24).tolist()
    assert speculator._rows[slots, 9].tolist() == caps
    # Dear tokens are for the longest alone, and not even for it.
    assert caps == sorted(caps)
    assert (caps[-1] > 0) == (per_token < 3)


@pytest.mark.parametrize("accepts", [True, False])
def test_the_optimal_budget_follows_what_the_step_shows(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first step with drafts already; a step without any does not undo it."""
    seen = []

    def spy(lengths, k, alpha, c_base, c_tok):
        seen.append(float(k[0]))
        return optimal_budget(lengths, k, alpha, c_base, c_tok)

    monkeypatch.setattr("megatron_dta.speculation.speculator.optimal_budget", spy)
    speculator = taught("optimal", ForwardCost(1.0, 1e-3, 0.0, 0.0))
    slots = opened(speculator, 12)
    assert seen[0] == 0.5
    text = np.arange(1000, 1400, dtype=np.int32)
    at = np.full(3, 12)
    for _ in range(40):
        proposal = speculator.propose(slots, np.full(3, 4))
        accepted = proposal.lengths if accepts else np.zeros(3, np.int64)
        pieces = [text[a : a + n + 1] for a, n in zip(at.tolist(), accepted.tolist(), strict=True)]
        at = at + [len(piece) for piece in pieces]
        speculator.record(proposal, accepted, np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]), 1.0)
    assert seen[-1] > 0.6 if accepts else seen[-1] < 0.1
    for slot in slots.tolist():
        speculator.finish(slot)
    speculator.end_step(2)
    fitted = speculator._acceptance
    assert fitted != (0.5, 1.0)
    speculator.end_step(3)
    assert speculator._acceptance == fitted


def costs_on_rank(rank: int, parallel: ParallelConfig) -> tuple:
    from megatron_dta.model import initialize_parallel

    initialize_parallel(5, parallel)
    gate = SpeculationGate(ForwardCost(), ForwardCost())
    drafting = SuffixDrafting(Speculator(DrafterParams(), BudgetParams(), ForwardCost(), gate))
    counts = [tokens for tokens in (1, 5, 9, 30) for _ in range(4)]
    # Each rank's own clock.
    drafting._measured = [
        (n, (1 + rank) * (1e-3 + 1e-5 * n + 2e-3 * kind), bool(kind)) for n in counts for kind in (0, 1)
    ]
    drafting.weights_changed(1)
    return drafting.speculator.cost, gate.plain_cost, gate.drafted_cost, gate.is_measured


@pytest.mark.parametrize("sizes", [dict(tensor_model_parallel_size=2), dict(pipeline_model_parallel_size=2), {}])
def test_ranks_of_a_replica_go_by_one_clock(sizes: dict[str, int], tmp_path: Path) -> None:
    """Those of two replicas by their own."""
    first, second = run_on_ranks(costs_on_rank, ParallelConfig(**sizes), 2, tmp_path / "ranks")
    at = np.array([1, 40])
    np.testing.assert_allclose(first[1].seconds(at), 1e-3 + 1e-5 * at, rtol=1e-3)
    np.testing.assert_allclose(first[2].seconds(at), 3e-3 + 1e-5 * at, rtol=1e-3)
    assert first[3] == second[3] == (not sizes)
    assert 1e-3 < first[0].seconds(20) < 4e-3
    if sizes:
        assert first == second
    else:
        np.testing.assert_allclose(second[1].seconds(at), 2 * first[1].seconds(at), rtol=1e-3)
