"""What the drafter learns from: whole responses, collections and not their rounds, training and not evaluations."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from conftest import seed_all
from megatron_dta.arguments import parse_arguments
from megatron_dta.rollouts import Rollout
from megatron_dta.sampling.engines.in_process.drafting import SuffixDrafting
from megatron_dta.sampling.engines.in_process.engine import InProcessEngine
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.prompts.tokenizer import NullTokenizer
from megatron_dta.sampling.treepo.environment import EnvironmentRunner
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.speculation.budgets import class_bounds
from megatron_dta.training.setup import build_trainer
from rollout_runs import Runs
from sampling_cases import EOS, VOCAB, make_model
from speculation_exact_cases import suffix_drafting
from speculation_training_cases import DATA_PARALLEL, TREES


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
    history = drafting.speculator.history
    return sorted([*history._lengths.tolist(), *(length for _, _, length in history._new)])


@pytest.mark.parametrize("method", ["", TREES], ids=["independent", "treepo"])
def test_lengths_are_those_of_responses(method: str, tmp_path: Path) -> None:
    """Of whole paths, once each, by their prompts; and what a collection would have taken without drafts."""
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(4))
        trainer, collections, printed = recorded_run(runs, f"--train-iters 3 {method}")
        rollouts = [rollout for collection in collections for rollout in collection]
        lengths = sorted(np.count_nonzero(rollout.loss_mask) for rollout in rollouts)
        drafting = trainer.source._drafting
        assert known_lengths(drafting) == lengths
        assert max(lengths) > 3  # longer than a segment
        prompts = {r.token_ids[: int(np.argmax(r.loss_mask))].tobytes() for r in rollouts}
        assert len(drafting.speculator.drafter.state_dict()["problems"]) == len(prompts)
        figures = drafting.speculator.current_report()
        # One more where a prompt's first pass is for one of its samples alone.
        longest = max(np.count_nonzero(r.loss_mask) for r in collections[-1])
        assert longest <= figures.plain_forwards <= longest + 1
        assert not drafting._paths
        (sentence,) = [line for line in printed.splitlines() if line.startswith("DAS: ")]
        assert re.fullmatch(r"DAS: drafts saved \d+ of \d+ forwards( \(about [\d.]+ s\))?, cost [\d.]+ s\.", sentence)


class Answering:
    """An environment of three turns."""

    def reset(self, record) -> None:
        self.turns = 0

    def step(self, action: str) -> tuple[list[int], float, bool]:
        self.turns += 1
        return [1, 2, 3], 0.0, self.turns == 3


def test_lengths_of_episodes() -> None:
    """Of all turns, without what the environment said."""
    drafting = suffix_drafting()
    engine = InProcessEngine(make_model(3, max_position_embeddings=100), drafting=drafting)
    runner = EnvironmentRunner(Answering, NullTokenizer(VOCAB, EOS))
    sampler = TreeSampler(engine, TreeSettings(width=4, max_response_tokens=60, segment_tokens=5), None, runner, 4)
    queries = [TreeQuery(i, np.array([5, 6 + i], np.int32)) for i in range(3)]
    trees = sampler.sample(queries, SamplingParams(60, EOS, seed=2), 0)
    lengths = [tree.sampled_length(leaf) for tree in trees for leaf in tree.leaves]
    assert any(tree.response_length(leaf) > tree.sampled_length(leaf) for tree in trees for leaf in tree.leaves)
    assert known_lengths(drafting) == sorted(lengths)
    assert len(drafting.speculator.drafter.state_dict()["problems"]) == 3
    engine.update_weights(1)
    assert drafting.speculator.history._bounds == class_bounds(np.array(lengths))


@pytest.mark.parametrize("method", ["", TREES], ids=["independent", "treepo"])
def test_rounds_of_dynamic_sampling_are_no_collections(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group is uniform, so each of four collections takes three rounds."""
    schedule, given = [], TreeSettings.from_config

    def from_config(treepo, sampling, collection, collections):
        schedule.append((collection, collections))
        return given(treepo, sampling, collection, collections)

    monkeypatch.setattr(TreeSettings, "from_config", from_config)
    with ExitStack() as stack:
        runs = Runs(stack, tmp_path, seed_all(4))
        (tmp_path / "reward.py").write_text("def reward(prompt, response, response_token_ids):\n    return 0.0\n")
        dynamic = "--dynamic-sampling --dynamic-sampling-max-rounds 3 --das-window 2 --train-iters 4"
        trainer, collections, _ = recorded_run(runs, f"{dynamic} {method}")
        rows = trainer.source.statistics()
        speculator = trainer.source._drafting.speculator
        assert rows["sampling_rounds"] == 3
        assert [{r.policy_version for r in collection} for collection in collections] == [{0}, {1}, {2}, {3}]
        assert set(speculator.drafter.state_dict()["steps"].tolist()) == {1, 2, 3}
        # Of the four calls between collections the first had nothing to forget.
        assert speculator._step == 3
        if method:
            assert schedule == [(number, 4) for number in range(4) for _ in range(3)]
        # Three rounds of three prompts, four responses each.
        assert len(speculator.history._new) == 36


def test_evaluations_leave_no_trace(tmp_path: Path) -> None:
    """Trees, lengths, estimates and figures are those of training, however often the weights are judged."""
    found = []
    evaluated = "--eval-interval 1 --eval-iters 4 --n-samples-per-eval-prompt 3"
    for flags in ("", evaluated, f"{evaluated} --eval-temperature 0"):
        command = f"{DATA_PARALLEL} --deterministic-mode --train-iters 3 {flags}"
        trainer = build_trainer(parse_arguments(command.split()), Console(quiet=True))
        try:
            trainer.run()
        finally:
            trainer.metrics.close()
        report = trainer.source._drafting.speculator.current_report()
        counts = report.live, report.tokens, report.lengths, report.drafted, report.accepted, report.plain_forwards
        found.append(
            (trainer.source._drafting.speculator.state_dict(), known_lengths(trainer.source._drafting), counts)
        )
    plain = found[0]
    assert len(plain[1]) == 3 * 9
    for other in found[1:]:
        assert other[0].keys() == plain[0].keys()
        assert all(np.array_equal(other[0][name], value) for name, value in plain[0].items())
        assert other[1:] == plain[1:]
