"""The drafter, the speculator and their connection to the engine: windows, bursts, deferred work, shared clocks."""

from types import SimpleNamespace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.sampling.in_process import suffix_drafting
from megatron_dta.sampling.in_process.drafting import NO_DRAFT, Round
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import GenerationRequest
from megatron_dta.sampling.speculation import clock
from megatron_dta.sampling.speculation.drafter import Drafter, DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.speculator import Speculator
from speculation_exact_cases import clockless


def told(drafter: Drafter, problem: str, prompt: np.ndarray, tokens: np.ndarray) -> int:
    sample = drafter.open(problem, prompt)
    drafter.extend(np.array([sample], np.uint32), tokens.astype(np.int32), np.array([0, len(tokens)]))
    return sample


@pytest.mark.parametrize("max_tokens", [700, 260])
def test_window_budget_and_state_of_the_drafter(max_tokens: int) -> None:
    """Of six steps with one, two, three samples; the smaller budget holds fewer than those of the window."""
    rng = seed_all(7)
    drafter = Drafter(DrafterParams(depth=6, early_depth=2, window=3, max_tokens=max_tokens))
    prompts = {name: rng.integers(0, 9, 5).astype(np.int32) for name in "abc"}
    empty = drafter._forest.num_nodes
    for step in range(6):
        for name in "abc"[: 1 + step % 3]:
            sample = drafter.open(name, prompts[name])
            tokens = rng.integers(0, 9, 50).astype(np.int32)
            drafter.extend(np.array([sample], np.uint32), tokens, np.array([0, 50]))
            drafter.finish(sample, step)
        drafter.end_step(step)
        assert drafter.stored_tokens <= max_tokens
        steps = [entry.step for entry in drafter._complete]
        if max_tokens == 700:
            assert set(steps) == {past for past in (step - 2, step - 1, step) if past >= 0}
        else:
            # The oldest left first: what stays are the last ones, and one more would have been too many.
            assert steps == sorted(past for past in range(step + 1) for _ in range(1 + past % 3))[-len(steps) :]
            assert drafter.stored_tokens > 260 - 2 * 60 or len(steps) == sum(1 + past % 3 for past in range(step + 1))
    running = drafter.open("a", prompts["a"])
    restored = Drafter(drafter.params)
    restored.load_state_dict(drafter.state_dict())
    restored.insert_all()
    again = restored.open("a", prompts["a"])
    most = np.array([5], np.int32)
    first, second = drafter.draft(np.array([running]), most), restored.draft(np.array([again]), most)
    assert all(np.array_equal(a, b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))
    assert first.lengths[0] > 0
    assert drafter.stored_tokens == restored.stored_tokens
    drafter.clear()
    drafter.end_step(99)
    assert (len(drafter._complete), drafter.stored_tokens, drafter._forest.num_nodes) == (0, 0, empty)


def test_speculator_restored_and_repeated_proposes_alike() -> None:
    """Two of them given the same calls, one saved and loaded between the steps."""
    rng = seed_all(9)

    def made() -> Speculator:
        return Speculator(DrafterParams(depth=8, early_depth=2), clockless(ForwardCost(8e-3, 1e-4)))

    both = [made(), made()]
    prompts = [rng.integers(0, 9, 4).astype(np.int32) for _ in range(5)]
    drafted = 0
    for step in range(4):
        slots = [np.array([s.open(str(i % 5), prompts[i % 5]) for i in range(20)]) for s in both]
        for _ in range(12):
            proposals = [s.propose(numbers, np.full(20, 9)) for s, numbers in zip(both, slots, strict=True)]
            assert np.array_equal(proposals[0].lengths, proposals[1].lengths)
            is_drafted = np.arange(proposals[0].tokens.shape[1]) < proposals[0].lengths[:, None]
            assert np.array_equal(proposals[0].tokens[is_drafted], proposals[1].tokens[is_drafted])
            drafted += proposals[0].lengths.sum()
            accepted = rng.integers(0, proposals[0].lengths + 1)
            offsets = np.concatenate([[0], np.cumsum(accepted + 1)])
            tokens = rng.integers(0, 3, offsets[-1]).astype(np.int32)
            for speculator, proposal in zip(both, proposals, strict=True):
                speculator.record(proposal, accepted, tokens, offsets, 1.0)
        for speculator, numbers in zip(both, slots, strict=True):
            for slot in numbers.tolist():
                speculator.finish(slot)
            report = speculator.end_step(step)
            assert sum(report.drafted) >= sum(report.accepted) >= 0
        state = both[1].state_dict()
        both[1] = made()
        both[1].load_state_dict(state)
    assert drafted > 100


def test_trees_that_are_filled_late_are_the_same() -> None:
    """Of one drafting that fills them round by round and one that fills them now and then, while samples begin, end,
    and are aborted; what was drafted before they were dropped does not matter."""
    rng = seed_all(11)
    initialize_parallel(11)
    cost, params = ForwardCost(base=1e-3, per_token=1e-6), DrafterParams(depth=10, window=2, max_tokens=3000)
    draftings = [
        SuffixDrafting(Speculator(params, SpeculationGate(cost, cost)), follows_clock)
        for follows_clock in (False, True)
    ]
    drafters = [drafting.speculator.drafter for drafting in draftings]
    rows: list[Request] = []
    count = compared = 0
    for step in range(80):
        while len(rows) < 6:
            request = GenerationRequest(count, rng.integers(0, 4, 7).astype(np.int32), 40, count, hold=bool(count % 2))
            rows.append(Request(request, count, 16, None))
            rows[-1].is_running = True
            count += 1
            for drafting in draftings:
                drafting.submitted(rows[-1:])
        lengths = np.minimum(rng.integers(1, 9, len(rows)), [len(row.tokens) - row.num_tokens for row in rows])
        appended = [rng.integers(0, 4, length).astype(np.int32) for length in lengths]
        for row, tokens in zip(rows, appended, strict=True):
            row.extend(tokens, np.zeros(len(tokens)))
        for drafting in draftings:
            drafting.verified(Round(list(rows), None, appended, 0.01, len(rows)))
            drafting.ran(0.01)
        done = [row for row in rows if row.num_tokens == len(row.tokens)]
        rows = [row for row in rows if row not in done]
        for drafting in draftings:
            drafting.finished(done)
            for row in [row for row in done if row.generation.hold]:
                drafting.released(row)
        if step % 7 == 6:
            drafters[1].insert_all()
            slots = [drafting._open(rows[:5]) for drafting in draftings]
            texts = [d.speculator._samples["text"][numbers] for d, numbers in zip(draftings, slots, strict=True)]
            most = np.full(len(texts[0]), 5)
            drafts = [drafter.draft(numbers, most) for drafter, numbers in zip(drafters, texts, strict=True)]
            assert all(np.array_equal(a, b) for a, b in zip(*(vars(d).values() for d in drafts), strict=True))
            compared += int(drafts[0].lengths.sum())
            if step % 2 == 0:
                draftings[1]._drop_trees()
        if step % 25 == 24:
            rows.clear()
            for drafting in draftings:
                drafting.abandoned()
                drafting.weights_changed(step // 25 + 1)
    assert compared > 20
    states = [drafting.speculator.state_dict() for drafting in draftings]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("follows_clock", [False, True])
def test_a_deterministic_run_drafts_by_no_clock(follows_clock: bool, monkeypatch: pytest.MonkeyPatch):
    """Two speculators with equal inputs except the seconds, by which drafts never pay for one of them."""
    rng = seed_all(5)
    monkeypatch.setattr(clock, "LOSS_SHARE", 1.0)
    monkeypatch.setattr(clock, "_FIRST_WAIT", 4)
    monkeypatch.setattr(suffix_drafting, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    initialize_parallel(5)
    cost = ForwardCost(base=1e-3, per_token=1e-6)
    speculators = [Speculator(DrafterParams(depth=10), SpeculationGate(cost, cost)) for _ in range(2)]
    draftings = [SuffixDrafting(speculator, follows_clock) for speculator in speculators]
    phrase, drafted = rng.integers(0, 50, 12).astype(np.int32), [[], []]
    for version in range(3):
        rows = [Request(GenerationRequest(i, phrase[:4], 60, i), i, 16, None) for i in range(4)]
        for drafting in draftings:
            drafting.weights_changed(version)
            drafting.submitted(rows)
        while rows[0].num_tokens < len(rows[0].tokens):
            known, limits = rows[0].num_tokens, np.array([len(row.tokens) - row.num_tokens - 1 for row in rows])
            new = np.array([phrase[known % 12]], np.int32)
            for drafting, drafts_of, slow in zip(draftings, drafted, (1.0, 100.0), strict=True):
                drafts, widths = (
                    drafting.propose(rows, limits) if drafting.wants(4) else ([NO_DRAFT] * 4, np.zeros(4, int))
                )
                drafts_of.append([draft[:width].tolist() for draft, width in zip(drafts, widths, strict=True)])
                seconds = (slow if widths.any() else 1.0) * 1e-3
                told = widths if widths.any() else None
                drafting.verified(Round(list(rows), told, [new] * 4, seconds, 4 + int(widths.sum())))
                drafting.ran(seconds)
            for row in rows:
                row.extend(new, np.zeros(1))
        for drafting in draftings:
            drafting.finished(rows)
    assert any(any(map(len, drafts)) for drafts in drafted[0])
    assert (drafted[0] == drafted[1]) is not follows_clock


@pytest.mark.parametrize("window", [2, 16])
def test_samples_that_wait_are_learned_as_if_at_once(window: int, monkeypatch: pytest.MonkeyPatch):
    """At the checkpoint, of the batches of the window; one drafting lets none wait. Of samples that are dropped
    unlearned the other one does not know the lengths either."""
    rng = seed_all(6)
    initialize_parallel(5)
    cost = ForwardCost(base=1e-3, per_token=1e-6)
    draftings = [
        SuffixDrafting(Speculator(DrafterParams(depth=4, window=window), SpeculationGate(cost, cost))) for _ in range(2)
    ]
    monkeypatch.setattr(draftings[1], "_is_whole", lambda request: False)
    for version in range(4):
        prompts = rng.integers(0, 50, (2, 6)).astype(np.int32)
        answers = [rng.integers(0, 50, rng.integers(1, 9)).astype(np.int32) for _ in range(6)]
        for drafting in draftings:
            drafting.weights_changed(version)
            rows = [Request(GenerationRequest(i, prompts[i % 2], 8, i), i, 16, None) for i in range(6)]
            drafting.submitted(rows)
            for row, answer in zip(rows, answers, strict=True):
                row.extend(answer, np.zeros(len(answer)))
            drafting.finished(rows)
            drafting.ended()
    samples = 6 * min(window + 1, 4)  # the batches of the window before this one
    assert [len(drafting._waiting) for drafting in draftings] == [samples, 0]
    waited, at_once = (drafting.state_dict()["speculation"] for drafting in draftings)
    assert not len(draftings[0]._waiting)
    different = [name for name, values in at_once.items() if str(waited[name]) != str(values)]
    assert all(window < 4 and name.startswith("history.") for name in different)
    assert [len(drafting.speculator.drafter._complete) for drafting in draftings] == [samples] * 2
