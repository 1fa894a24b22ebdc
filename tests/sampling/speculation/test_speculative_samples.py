"""Speculation gives the samples of plain decoding, and the drafter learns from whole responses of training alone."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.common.console import Console
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.clock import DraftingClock
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.wiring.setup import build_trainer
from rollout_forest import NEVER, SETTINGS, Drive, assert_same, poison_pages, run_forest, started
from rollout_runs import Runs
from sampling_cases import EOS, SHAPES, make_model, random_prompts
from speculation_exact_cases import Adversary, answers_of, suffix_drafting
from speculation_training_cases import DATA_PARALLEL, TREES

GROUPED = SHAPES["grouped queries, QK-norm, untied"]


@pytest.mark.parametrize("kind", ["right", "wrong", "random", "mixed", "suffix"])
def test_a_forest_of_requests(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of held requests, ends of sequence inside drafts, length caps, pools that preempt, poisoned pages."""
    seed_all(len(kind))
    model = make_model(3, **GROUPED | dict(num_layers=1))
    poison_pages(monkeypatch)
    drive = Drive(seed=12, prompts=2, depth=1, longest=20)
    reference = run_forest(started(model), drive)
    names = {"mixed": list(SETTINGS), "suffix": ["one row"]}.get(kind, ["default", "small pool"])
    for number, settings in enumerate(SETTINGS[name] for name in names):
        drafting = suffix_drafting() if kind == "suffix" else Adversary(kind, answers_of(reference), number)
        engine = started(model, **settings, drafting=drafting)
        samples = run_forest(engine, replace(drive, order=number))
        assert_same(samples, reference, 1e-12)
        statistics = engine.statistics()
        assert engine.pages_in_use == 0
        assert statistics["decoded_tokens"] == sum(len(result.token_ids) for _, result in samples.values())
        if kind == "wrong":
            assert statistics["accepted_drafts"] == 0
        if kind == "right" and settings.get("max_tokens", 100) > 50 and "pages" not in settings:
            assert statistics["accepted_drafts"] > 0.5 * statistics["decoded_tokens"]
        if kind != "suffix":
            assert statistics["drafted_tokens"] == drafting.drafted > 0
            assert statistics["accepted_drafts"] == drafting.accepted


class Coin(DraftingClock):
    """Lets drafts begin, stay and end by chance."""

    rng = np.random.default_rng(5)

    def took(self, live: int, passes: float, seconds: float, asked: bool) -> None:
        self.is_on = self.is_on and self.rng.random() < 0.9
        self.is_due = not self.is_on and self.rng.random() < 0.5

    def begin(self, seconds: float) -> None:
        self.is_on, self.is_due = True, False

    def goes_on(self, seconds: float) -> bool:
        self.is_on = self.rng.random() < 0.7
        return self.is_on


@pytest.mark.parametrize(("temperature", "top_p", "seed"), [(0.0, 1.0, 0), (0.6, 1.0, 1), (1.0, 0.9, 3)])
def test_thousands_of_sequences_in_float32(temperature: float, top_p: float, seed: int) -> None:
    """Over the three cases: 576 sequences of repeated prompts over several steps, in the order of training; in two
    cases drafts come and go."""
    seed_all(seed)
    model = make_model(20 + seed, torch.float32, num_layers=1)
    params = SamplingParams(1, EOS, temperature, top_p, seed=5, other_eos_ids=(3,))
    prompts = random_prompts(np.random.default_rng(seed), [1, 5, 9, 14] * 2)
    drafting = suffix_drafting(follows_clock=seed in (0, 3))
    if drafting.follows_clock:
        drafting._clock = Coin()
    plain, engine = started(model, params), started(model, params, drafting=drafting)
    steps, texts = 3, []
    depth = drafting.speculator.drafter.params.depth
    for step in range(steps):
        requests = [GenerationRequest(n, prompts[n // 8], 14 + n // 8 % 9, n) for n in range(8 * len(prompts))]
        for sampler in (plain, engine):
            sampler.start(params, step)
            sampler.update_weights(step)
        expected, samples = generate(plain, requests), generate(engine, requests)
        for want, got in zip(expected, samples, strict=True):
            assert want.token_ids.tolist() == got.token_ids.tolist()
            assert want.finish_reason == got.finish_reason
            assert np.allclose(want.logprobs, got.logprobs, rtol=0, atol=2e-5)
        rows = zip(requests, samples, strict=True)
        texts += [[*request.token_ids[1 - depth :], *result.token_ids] for request, result in rows]
    statistics = engine.statistics()
    assert statistics["accepted_drafts"] > 0.01 * statistics["decoded_tokens"]
    assert statistics["drafted_tokens"] > statistics["accepted_drafts"]
    assert statistics["forwards"] < plain.statistics()["forwards"]
    assert len(drafting.speculator.drafter._complete) == 192
    # The trees have what was sampled, and nothing of a draft besides.
    state = drafting.speculator.drafter.state_dict()
    stored = np.split(state["tokens"], np.cumsum(state["lengths"])[:-1])[int(state["num_prompts"]) :]
    assert sorted(text.tolist() for text in stored) == sorted(texts)


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


def recorded_run(runs: Runs, flags: str) -> tuple[Any, list[list[Rollout]], str]:
    """A run's trainer, the rollouts of its collections, and what it printed."""
    trainer, output = runs.trainer(f"--rollout-speculation das {flags}", "in-process")
    collect, collections = trainer.source.next_batch, []
    trainer.source.next_batch = lambda number: collections.append(collect(number)) or collections[-1]
    try:
        trainer.run()
    finally:
        trainer.metrics.close()
    return trainer, collections, output.getvalue()


def known_lengths(drafting: SuffixDrafting) -> list[int]:
    drafting.state_dict()  # learns those that wait
    history = drafting.speculator.history
    return sorted([*history._lengths.tolist(), *(length for lengths in history._new.values() for length in lengths)])


@pytest.mark.parametrize("method", ["", TREES], ids=["independent", "treepo"])
def test_lengths_are_those_of_responses(method: str, tmp_path: Path) -> None:
    """Of whole paths, once each, by their prompts; and what a collection would have taken without drafts."""
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(4))
        trainer, collections, printed = recorded_run(runs, f"--train-iters 3 {method}")
        rollouts = [rollout for collection in collections for rollout in collection]
        lengths = sorted(np.count_nonzero(rollout.loss_mask) for rollout in rollouts)
        drafting = trainer.source._engine.drafting
        assert known_lengths(drafting) == lengths
        assert max(lengths) > 3  # longer than a segment
        prompts = {r.token_ids[: int(np.argmax(r.loss_mask))].tobytes() for r in rollouts}
        drafting.state_dict()  # learns what waits
        assert len(drafting.speculator.drafter.state_dict()["problems"]) == len(prompts)
        assert not drafting._paths
        (sentence,) = [line for line in printed.splitlines() if line.startswith("DAS: ")]
        assert re.fullmatch(r"DAS: drafts gave \d+ of \d+ sampled tokens; .*( s less| s longer) with them\.", sentence)


@pytest.mark.parametrize("method", ["", TREES], ids=["independent", "treepo"])
def test_rounds_of_dynamic_sampling_are_no_collections(method: str, tmp_path: Path) -> None:
    """Every group is uniform, so each of four collections takes three rounds."""
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(4))
        (tmp_path / "reward.py").write_text("def reward(prompt, response, response_token_ids):\n    return 0.0\n")
        dynamic = "--dynamic-sampling --dynamic-sampling-max-rounds 3 --das-window 2 --train-iters 4"
        trainer, collections, _ = recorded_run(runs, f"{dynamic} {method}")
        rows = trainer.source.statistics()
        drafting = trainer.source._inner._engine.drafting
        speculator = drafting.speculator
        drafting.state_dict()  # learns what waits
        assert rows["sampling_rounds"] == 3
        assert [{r.policy_version for r in collection} for collection in collections] == [{0}, {1}, {2}, {3}]
        assert set(speculator.drafter.state_dict()["steps"].tolist()) == {1, 2, 3}
        # Of the four calls between collections the first had nothing to forget.
        assert speculator.step == 3
        # Three rounds of three prompts, four responses each.
        assert sum(map(len, speculator.history._new.values())) == 36


def test_evaluations_leave_no_trace(tmp_path: Path) -> None:
    """Trees, lengths, estimates and figures are those of training, however often the weights are judged."""
    outcomes = []
    evaluated = "--eval-interval 1 --eval-iters 4 --n-samples-per-eval-prompt 3"
    for flags in ("", evaluated, f"{evaluated} --eval-temperature 0"):
        command = f"{DATA_PARALLEL} --deterministic-mode --train-iters 3 {flags}"
        trainer = build_trainer(parse_arguments(command.split()), Console(quiet=True))
        try:
            trainer.run()
        finally:
            trainer.metrics.close()
        drafting = trainer.source._engine.drafting
        report = drafting.speculator.current_report()
        counts = report.live, report.tokens, report.lengths, report.drafted, report.accepted
        drafting.state_dict()  # learns what waits
        outcomes.append((drafting.speculator.state_dict(), known_lengths(drafting), counts))
    plain = outcomes[0]
    assert len(plain[1]) == 3 * 9
    for other in outcomes[1:]:
        assert other[0].keys() == plain[0].keys()
        assert all(np.array_equal(other[0][name], value) for name, value in plain[0].items())
        assert other[1:] == plain[1:]
