"""The parts of the rollout benchmark that measure speculation on the engine.

``das``: recorded samples, whose acceptance is that of the record (``forced_engine``), with speculation and without; the
measured makespans beside those that ``replay_das`` would predict from what a forward costs here. ``das-noise``: how far
the rounding of another number of tokens in a pass moves samples, with drafts and with another batch size.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from forced_engine import FixedDrafting, ForcedEngine, KnownDrafting
from megatron_dta.errors import InputError
from megatron_dta.rollouts import load_rollouts
from megatron_dta.sampling.engines.drafting import Drafting, SuffixDrafting
from megatron_dta.sampling.engines.in_process import InProcessEngine
from megatron_dta.sampling.engines.interface import GenerationRequest, GenerationResult, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.speculation.drafter import DrafterParams
from megatron_dta.speculation.forward_cost import ForwardCost
from megatron_dta.speculation.replay import (
    RecordedSample,
    plain_makespan,
    recorded_samples,
    remember,
    replay_wave,
    split_history,
    waves,
)
from megatron_dta.speculation.speculator import BUDGETS, BudgetParams, Speculator
from megatron_dta.speculation.suffix_forest import DraftParams
from rollout_setup import Setup, build_engine, check_arguments, counts_since, synchronize

_PASSES, _WARM_PASSES = 40, 8
"""Passes from which the cost of one is taken, and how many of them come before it is."""


def add_das_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``das``."""
    parser.add_argument("--rollouts", required=True, help="recorded samples: .jsonl, .parquet or .npz")
    parser.add_argument("--past", type=int, default=4, help="past samples of each problem that the drafter knows")
    parser.add_argument("--live-batch", type=int, help="samples of a wave, at most --batch (default: --batch)")
    parser.add_argument("--waves", type=int, default=1, help="waves that are run, the first ones")
    parser.add_argument("--stop-degenerate", action="store_true", help="cut samples where they are in a loop or noise")
    parser.add_argument("--das-budget", choices=BUDGETS, default="straggler")
    parser.add_argument("--das-draft-tokens", type=int, default=DraftParams().width)


def add_noise_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``das-noise``."""
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--response-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, help="default: --batch")
    parser.add_argument("--temperature", type=float, default=0.1, help="random weights at 1 draw nearly uniformly")
    parser.add_argument("--draft-tokens", type=int, default=7)


def run_das(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """One row: makespans, measured and predicted."""
    check_arguments(arguments, "waves", "das_draft_tokens")
    live = arguments.live_batch or arguments.batch
    if not 1 <= live <= arguments.batch:
        raise InputError(f"--live-batch must be from 1 to --batch {arguments.batch}, not {live}")
    history, parts = _recorded(arguments, setup, live)
    samples = [sample for part in parts for sample in part]
    largest = max(map(len, parts))
    drafted_cost = _drafted_cost(arguments, setup, largest)
    plain_cost = _plain_cost(arguments, setup, largest)

    def speculator(budget_cost: ForwardCost) -> Speculator:
        drafter = DrafterParams(draft=DraftParams(width=arguments.das_draft_tokens))
        made = Speculator(drafter, BudgetParams(arguments.das_budget), budget_cost)
        remember(made, history)
        return made

    predicted = speculator(drafted_cost)
    reports = [replay_wave(predicted, part, len(history)) for part in parts]
    measured = {
        "plain": _makespan(arguments, setup, parts, lambda: None),
        "das": _makespan(arguments, setup, parts, lambda: SuffixDrafting(speculator(drafted_cost))),
    }
    tokens = sum(len(sample.generated) for sample in samples)
    steps = measured["das"]["decoded_tokens"] - measured["das"]["accepted_drafts"]
    seconds = {name: found["makespan"] for name, found in measured.items()}
    predicted_seconds = {
        "plain": sum(plain_makespan(part, plain_cost) for part in parts),
        "das": sum(report.makespan for report in reports),
    }
    return [
        {
            "part": "das",
            "samples": len(samples),
            "waves": len(parts),
            "live_batch": largest,
            "longest": max(len(sample.generated) for sample in samples),
            "plain_seconds": seconds["plain"],
            "das_seconds": seconds["das"],
            "saved": 1 - seconds["das"] / seconds["plain"],
            "predicted_plain_seconds": predicted_seconds["plain"],
            "predicted_das_seconds": predicted_seconds["das"],
            "predicted_saved": 1 - predicted_seconds["das"] / predicted_seconds["plain"],
            "tokens_per_forward": tokens / steps,
            "predicted_tokens_per_forward": tokens / sum(sum(report.steps) for report in reports),
            "plain_forwards": measured["plain"]["forwards"],
            "das_forwards": measured["das"]["forwards"],
            "drafted_tokens": measured["das"]["drafted_tokens"],
            "accepted_tokens": measured["das"]["accepted_drafts"],
            "prompt_seconds": measured["plain"]["prompt_seconds"],
            "cost": asdict(drafted_cost),
            "plain_cost": asdict(plain_cost),
        }
    ]


def _recorded(
    arguments: argparse.Namespace, setup: Setup, live: int
) -> tuple[list[list[RecordedSample]], list[list[RecordedSample]]]:
    """History and waves; a sample's problem is its prompt, as it is for the engine."""
    samples = recorded_samples(load_rollouts(arguments.rollouts), arguments.stop_degenerate)
    if any(len(sample.turn_ends) > 1 for sample in samples):
        raise InputError(f"{arguments.rollouts}: has samples of several turns; this part runs those of one turn")
    largest = max(int(max(sample.prompt.max(), sample.generated.max())) for sample in samples)
    if largest >= setup.model.true_vocab_size:
        raise InputError(
            f"{arguments.rollouts}: token {largest} is beyond the vocabulary {setup.model.true_vocab_size} of "
            f"--shape {arguments.shape}; choose a shape with a larger one"
        )
    longest = max(len(sample.prompt) + len(sample.generated) for sample in samples)
    if longest > arguments.max_position_embeddings:
        raise InputError(f"--max-position-embeddings {arguments.max_position_embeddings} is less than {longest}")
    named = [
        replace(s, problem=hashlib.blake2b(s.prompt.astype(np.int32).tobytes(), digest_size=16).hexdigest())
        for s in samples
    ]
    history, now = split_history(named, arguments.past)
    if not now:
        raise InputError(f"{arguments.rollouts}: --past {arguments.past} leaves no sample to run")
    return history, waves(now, live)[: arguments.waves]


def _makespan(
    arguments: argparse.Namespace,
    setup: Setup,
    parts: Sequence[Sequence[RecordedSample]],
    make_drafting: Callable[[], Drafting | None],
) -> dict[str, float]:
    """Seconds of decoding all waves without their prompts, the median of the runs, and counts.

    The first run captures and warms up. Each run drafts anew, so that all begin with the same history.
    """
    recorded = {i: s.generated.astype(np.int32) for i, s in enumerate(s for part in parts for s in part)}
    engine = build_engine(setup, arguments, None, partial(ForcedEngine, recorded))
    spent, prompts, counts = [], [], {}
    for run in range(arguments.runs + 1):
        engine.draft_with(make_drafting())
        before = engine.statistics()
        first = 0
        for part in parts:
            _generate(engine, setup, part, first)
            first += len(part)
        counts = counts_since(before, engine)
        engine.draft_with(None)
        before, first = engine.statistics(), 0
        for part in parts:
            _generate(engine, setup, part, first, 1)
            first += len(part)
        if run:
            prompts.append(counts_since(before, engine)["seconds"])
            spent.append(counts["seconds"])
    return counts | {"makespan": median(spent) - median(prompts), "prompt_seconds": median(prompts)}


def _generate(
    engine: InProcessEngine, setup: Setup, samples: Sequence[RecordedSample], first_key: int, most: int | None = None
) -> list[GenerationResult]:
    engine.start(SamplingParams(1, eos_id=-1), 0)
    synchronize(setup.device)
    return generate(
        engine,
        [
            GenerationRequest(i, s.prompt.astype(np.int32), most or len(s.generated), first_key + i)
            for i, s in enumerate(samples)
        ],
    )


def _drafted_cost(arguments: argparse.Namespace, setup: Setup, live: int) -> ForwardCost:
    """What a pass of n tokens costs while drafting: few and many rows, with and without drafted tokens."""
    most = min(16 * live, 768)
    counts = sorted({(1, 0), (1, 7), (min(8, live), 3), (live, 0), (live, 1), (live, most // live - 1)})
    points = []
    for rows, width in counts:
        if width < 0:
            continue
        drafting = FixedDrafting(width)
        _run_random(arguments, setup, build_engine(setup, arguments, drafting), rows, _PASSES + width)
        ends = drafting.ends[rows * (width + 1)][_WARM_PASSES - 1 :]
        points.append((rows * (width + 1), (ends[-1] - ends[0]) / (len(ends) - 1)))
    return ForwardCost.fit(*np.array(points).T)


def _plain_cost(arguments: argparse.Namespace, setup: Setup, live: int) -> ForwardCost:
    """What a pass of n rows costs in plain decoding at its best settings."""
    engine, points = build_engine(setup, arguments), []
    for rows in sorted({1, max(2, live // 8), max(3, live // 2), max(4, live)}):
        _run_random(arguments, setup, engine, rows, arguments.burst + 2)
        seconds = {}
        for length in (1, 4 * arguments.burst + 1):
            runs = [_run_random(arguments, setup, engine, rows, length) for _ in range(2)]
            seconds[length] = min(runs)
        first, last = seconds.values()
        points.append((rows, max(last - first, 1e-9) / (4 * arguments.burst)))
    return ForwardCost.fit(*np.array(points).T)


def _run_random(arguments: argparse.Namespace, setup: Setup, engine: InProcessEngine, rows: int, length: int) -> float:
    """Seconds of sampling ``length`` tokens of so many prompts of 128 tokens."""
    before = engine.statistics()
    engine.start(SamplingParams(1, eos_id=-1), 0)
    synchronize(setup.device)
    prompts = np.random.default_rng(rows).integers(0, setup.model.true_vocab_size, (rows, 128)).astype(np.int32)
    generate(engine, [GenerationRequest(i, prompt, length, i) for i, prompt in enumerate(prompts)])
    return counts_since(before, engine)["seconds"]


def run_noise(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """One row for each other way of running the same requests: how far its samples are from plain decoding's."""
    check_arguments(arguments, "prompt_tokens", "response_tokens", "draft_tokens")
    count = arguments.requests or arguments.batch
    rng = np.random.default_rng(arguments.seed)
    prompts = rng.integers(0, setup.model.true_vocab_size, (count, arguments.prompt_tokens)).astype(np.int32)
    requests = [GenerationRequest(i, prompt, arguments.response_tokens, i) for i, prompt in enumerate(prompts)]
    params = SamplingParams(1, eos_id=-1, temperature=arguments.temperature, seed=arguments.seed)

    def sampled(drafting: Drafting | None = None, batch: int | None = None) -> list[GenerationResult]:
        changed = argparse.Namespace(**vars(arguments) | {"batch": batch or arguments.batch})
        engine = build_engine(setup, changed, drafting)
        engine.start(params, 0)
        return generate(engine, requests)

    reference = sampled()
    answers = {i: result.token_ids for i, result in enumerate(reference)}
    known = KnownDrafting(answers, arguments.draft_tokens, setup.model.true_vocab_size, arguments.seed)
    runs = {
        "the same again": sampled(),
        "another batch size": sampled(batch=max(1, arguments.batch // 4)),
        "drafts": sampled(known),
    }
    return [{"part": "das-noise", "run": name, **_distance(reference, run)} for name, run in runs.items()]


def _distance(reference: Sequence[GenerationResult], other: Sequence[GenerationResult]) -> dict[str, float]:
    """Up to where each pair of samples parts: how often it does, and how far the logprobs of equal tokens differ.

    The divergence is the mean of exp(d) - 1 - d over the reference's tokens, d the difference of their logprobs.
    """
    flips = compared = 0
    differences = []
    for one, two in zip(reference, other, strict=True):
        same = np.logical_and.accumulate(one.token_ids == two.token_ids)
        equal = int(same.sum())
        flips += equal < len(same)
        compared += min(equal + 1, len(same))
        differences.append(two.logprobs[:equal].astype(np.float64) - one.logprobs[:equal])
    d = np.concatenate(differences)
    return {
        "flips_per_thousand": 1e3 * flips / compared,
        "kl": float((np.exp(d) - 1 - d).mean()) if len(d) else 0.0,
        "mean_logprob_difference": float(np.abs(d).mean()) if len(d) else 0.0,
        "compared_tokens": compared,
    }
