"""The part ``das`` of the rollout benchmark: measures speculation on the engine.

Recorded samples run with and without speculation; drafts are accepted according to the record (``forced_engine``). The
measured makespans are compared with those that ``replay_das`` predicts from the measured cost of a pass. All makespans
include the prompts: measured ones from the first submission to the last token, predicted ones with the time of the
prompts in the run itself. Plain decoding runs in bursts. The control is text that cannot be drafted well, for which
speculation must not be slower than plain decoding.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial, reduce
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from common.bandwidth import synchronize
from common.engine import Setup, build_engine, check_arguments, counts_since, warm_up
from common.forced_engine import FixedDrafting, ForcedEngine, WaveTime
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling.in_process.drafting import Drafting
from megatron_dta.sampling.in_process.suffix_drafting import SuffixDrafting
from megatron_dta.sampling.interface import GenerationRequest, generate
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.speculation.drafter import DrafterParams
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate
from megatron_dta.sampling.speculation.lengths import BUDGETS
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Speculator
from megatron_dta.sampling.speculation.suffix_forest import DraftParams
from rollout_parts.das_replay import (
    RecordedSample,
    plain_lives,
    recorded_samples,
    remember,
    replay_wave,
    split_history,
    waves,
)
from rollout_parts.fitted_cost import fitted_cost

_PASSES, _WARM_PASSES = 40, 8
"""Timed passes and warm-up passes."""

_UNRECORDED = 2**48
"""First key without a record."""


def add_das_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``das``."""
    parser.add_argument("--rollouts", required=True, help="recorded samples: .jsonl, .parquet or .npz")
    parser.add_argument("--past", type=int, default=4, help="past samples of each problem in the trees")
    parser.add_argument("--live-batch", type=int, help="samples of a wave, at most --batch (default: --batch)")
    parser.add_argument("--waves", type=int, default=1, help="number of waves to run")
    parser.add_argument("--stop-degenerate", action="store_true", help="cut samples that enter a loop or noise")
    parser.add_argument(
        "--control", action="store_true", help="add a row for text of the same lengths that cannot be drafted well"
    )
    parser.add_argument("--das-budget", choices=BUDGETS, default="straggler")
    parser.add_argument("--das-draft-tokens", type=int, default=DraftParams().width)


def run_das(arguments: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """A row for the recorded samples and, with ``--control``, one for text that cannot be drafted."""
    check_arguments(arguments, "waves", "das_draft_tokens")
    live = arguments.live_batch or arguments.batch
    if not 1 <= live <= arguments.batch:
        raise InputError(f"--live-batch must be from 1 to --batch {arguments.batch}, not {live}")
    history, parts = _recorded(arguments, setup, live)
    cases = {"recorded": (history, parts)}
    if arguments.control:
        cases["control"] = _control(history, parts)
    recorded = {
        _key(case, i): sample.generated.astype(np.int32)
        for case, name in enumerate(cases)
        for i, sample in enumerate(s for part in cases[name][1] for s in part)
    }
    # One engine for all runs, so that graphs are captured once.
    engine = build_engine(setup, arguments, None, partial(ForcedEngine, recorded))
    largest = max(map(len, parts))
    warm_up(setup, engine, largest, SamplingParams(1, eos_id=-1))
    plain_cost = _plain_cost(arguments, setup, engine, largest)
    drafted_cost = _drafted_cost(setup, engine, largest)
    # The control has the lengths of the recorded samples, so plain decoding runs the same passes.
    plain, _ = _measured(arguments, setup, engine, parts, 0, lambda: None)
    rows = []
    for case, (name, (past, now)) in enumerate(cases.items()):
        make = partial(_speculator, arguments, plain_cost, drafted_cost, past)
        reports = [replay_wave(replaying, part, len(past), arguments.burst) for replaying in [make()] for part in now]
        das, counts = _measured(arguments, setup, engine, now, case, lambda make=make: SuffixDrafting(make()))
        rows.append(_row(setup, name, now, reports, (plain, das), counts, (plain_cost, drafted_cost)))
    return rows


def _speculator(
    arguments: argparse.Namespace,
    plain: ForwardCost,
    drafted: ForwardCost,
    history: Sequence[Sequence[RecordedSample]],
) -> Speculator:
    drafter = DrafterParams(draft=DraftParams(width=arguments.das_draft_tokens))
    gate = SpeculationGate(plain, drafted)
    speculator = Speculator(drafter, gate, arguments.das_budget)
    remember(speculator, history)
    return speculator


def _row(
    setup: Setup,
    name: str,
    parts: Sequence[Sequence[RecordedSample]],
    reports: Sequence[SpeculationReport],
    times: tuple[WaveTime, WaveTime],
    counts: dict[str, float],
    costs: tuple[ForwardCost, ForwardCost],
) -> dict[str, Any]:
    """The figures of one case; pairs are (plain decoding, speculation)."""
    (plain, das), (plain_cost, drafted_cost) = times, costs
    samples = [sample for part in parts for sample in part]
    # The first forward of a replay is the last pass of the prompts.
    predicted_plain = plain.prompt_seconds + sum(
        float(plain_cost.seconds(plain_lives(part)[1:]).sum()) for part in parts
    )
    # In a replay the first token of each sample has a pass of its own, which is the last pass of the prompts.
    first = float(plain_cost.seconds(plain_lives(samples)[:1]).sum()) * len(parts)
    # A replay runs and times the drafter itself.
    predicted_das = das.prompt_seconds + sum(report.makespan + report.draft_seconds for report in reports) - first
    tokens = sum(len(sample.generated) for sample in samples)
    return {
        "part": "das",
        "case": name,
        "samples": len(samples),
        "waves": len(parts),
        "live_batch": max(map(len, parts)),
        "longest": max(len(sample.generated) for sample in samples),
        "plain_seconds": plain.seconds,
        "das_seconds": das.seconds,
        "saved": 1 - das.seconds / plain.seconds,
        "predicted_plain_seconds": predicted_plain,
        "predicted_das_seconds": predicted_das,
        "drafter_seconds": sum(report.draft_seconds for report in reports),
        "predicted_saved": 1 - predicted_das / predicted_plain,
        "plain_prompt_seconds": plain.prompt_seconds,
        "das_prompt_seconds": das.prompt_seconds,
        "plain_forwards": plain.forwards,
        "das_forwards": das.forwards,
        "plain_pass_ms": 1e3 * plain.pass_seconds,
        "das_pass_ms": 1e3 * das.pass_seconds,
        "least_pass_ms": 1e3 * setup.bound_seconds(0),
        "doubts": doubts({"plain": plain, "das": das}, setup.bound_seconds(0)),
        "tokens_per_forward": tokens / (counts["decoded_tokens"] - counts["accepted_drafts"]),
        "predicted_tokens_per_forward": tokens / sum(sum(report.steps) for report in reports),
        "drafted_tokens": counts["drafted_tokens"],
        "accepted_tokens": counts["accepted_drafts"],
        "cost": asdict(drafted_cost),
        "plain_cost": asdict(plain_cost),
    }


def text_like_control(samples: Sequence[RecordedSample], seed: int) -> list[RecordedSample]:
    """Samples of the same shape that are hard to draft: each token is drawn from the tokens that followed the previous
    one in these samples. They look like text from token to token, and no two agree for long."""
    rng = np.random.default_rng(seed)
    stream = np.concatenate([sample.generated for sample in samples])
    order = np.argsort(stream[:-1], kind="stable")
    values, begins, counts = np.unique(stream[:-1][order], return_index=True, return_counts=True)
    followers = stream[1:][order]
    lengths = np.array([len(sample.generated) for sample in samples])
    drawn = np.zeros((len(samples), int(lengths.max())), stream.dtype)
    drawn[:, 0] = token = stream[rng.integers(0, len(stream), len(samples))]
    for i in range(1, drawn.shape[1]):
        entry = np.minimum(np.searchsorted(values, token), len(values) - 1)
        known = values[entry] == token
        pick = followers[begins[entry] + rng.integers(0, 2**31, len(samples)) % counts[entry]]
        token = np.where(known, pick, stream[rng.integers(0, len(stream), len(samples))])
        drawn[:, i] = token
    rows = zip(samples, drawn, lengths.tolist(), strict=True)
    return [replace(sample, generated=row[:length].copy(), stopped=False) for sample, row, length in rows]


def _control(
    history: list[list[RecordedSample]], parts: list[list[RecordedSample]]
) -> tuple[list[list[RecordedSample]], list[list[RecordedSample]]]:
    """History and waves of the same lengths with randomly drawn tokens."""
    groups = [*history, *parts]
    drawn = text_like_control([sample for group in groups for sample in group], seed=0)
    ends = np.cumsum([0, *map(len, groups)]).tolist()
    again = [drawn[begin:end] for begin, end in pairwise(ends)]
    return again[: len(history)], again[len(history) :]


def _key(case: int, sample: int) -> int:
    """Key of the request of a recorded sample; each case has its own range."""
    return case * 2**32 + sample


def doubts(measured: dict[str, WaveTime], least_pass: float) -> list[str]:
    """Reasons why a measurement cannot be right.

    least_pass: seconds in which a pass reads the weights.
    """
    result = []
    for name, time in measured.items():
        if time.forwards > time.prompt_forwards and time.pass_seconds < least_pass:
            result.append(
                f"{name}: a pass of {1e3 * time.pass_seconds:.3g} ms is shorter than the {1e3 * least_pass:.3g} ms in "
                "which the weights are read: the time is not attributed right, or --memory-bandwidth-gbs is too low"
            )
        if time.captures:
            result.append(f"{name}: {time.captures} graphs were captured while time was taken")
    return result


def _recorded(
    arguments: argparse.Namespace, setup: Setup, live: int
) -> tuple[list[list[RecordedSample]], list[list[RecordedSample]]]:
    """History and waves; the problem of a sample is its prompt, as in the engine."""
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


def _measured(
    arguments: argparse.Namespace,
    setup: Setup,
    engine: ForcedEngine,
    parts: Sequence[Sequence[RecordedSample]],
    case: int,
    make_drafting: Callable[[], Drafting | None],
) -> tuple[WaveTime, dict[str, float]]:
    """Time of all waves including prompts in the median run, and the changes of the engine's counters in that run.

    Each run has a new drafter, so that all runs begin with the same history and run the same passes. The first run,
    which compiles and captures, is not timed.
    """

    def run() -> tuple[WaveTime, dict[str, float]]:
        engine.draft_with(make_drafting())
        before = engine.statistics()
        times, first = [], 0
        for part in parts:
            engine.start(SamplingParams(1, eos_id=-1), 0)
            requests = [
                GenerationRequest(i, s.prompt.astype(np.int32), len(s.generated), _key(case, first + i))
                for i, s in enumerate(part)
            ]
            synchronize(setup.device)
            times.append(engine.timed(requests)[1])
            first += len(part)
        return reduce(add, times), counts_since(before, engine)

    run()
    runs = sorted((run() for _ in range(arguments.runs)), key=lambda measured: measured[0].seconds)
    return runs[len(runs) // 2]


def _drafted_cost(setup: Setup, engine: ForcedEngine, live: int) -> ForwardCost:
    """Cost of a pass of n tokens while drafting, from few and many rows with and without drafted tokens."""
    most = min(16 * live, 768)
    counts = sorted({(1, 0), (1, 7), (min(8, live), 3), (live, 0), (live, 1), (live, most // live - 1)})
    points = []
    for rows, width in counts:
        if width < 0:
            continue
        drafting = FixedDrafting(width)
        engine.draft_with(drafting)
        _run_random(setup, engine, rows, _PASSES + width)
        ends = drafting.ends[rows * (width + 1)][_WARM_PASSES - 1 :]
        points.append((rows * (width + 1), (ends[-1] - ends[0]) / (len(ends) - 1)))
    return fitted_cost(*np.array(points).T)


def _plain_cost(arguments: argparse.Namespace, setup: Setup, engine: ForcedEngine, live: int) -> ForwardCost:
    """Cost of a pass of n rows in plain decoding with its best settings."""
    engine.draft_with(None)
    points = []
    for rows in sorted({1, max(2, live // 8), max(3, live // 2), max(4, live)}):
        _run_random(setup, engine, rows, arguments.burst + 2)
        seconds = {}
        for length in (1, 4 * arguments.burst + 1):
            runs = [_run_random(setup, engine, rows, length) for _ in range(2)]
            seconds[length] = min(runs)
        first, last = seconds.values()
        points.append((rows, max(last - first, 1e-9) / (4 * arguments.burst)))
    return fitted_cost(*np.array(points).T)


def _run_random(setup: Setup, engine: ForcedEngine, rows: int, length: int) -> float:
    """Seconds of sampling ``length`` tokens for ``rows`` prompts of 128 tokens."""
    before = engine.statistics()
    engine.start(SamplingParams(1, eos_id=-1), 0)
    synchronize(setup.device)
    prompts = np.random.default_rng(rows).integers(0, setup.model.true_vocab_size, (rows, 128)).astype(np.int32)
    generate(engine, [GenerationRequest(i, prompt, length, _UNRECORDED + i) for i, prompt in enumerate(prompts)])
    return counts_since(before, engine)["seconds"]
