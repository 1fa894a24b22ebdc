"""Replays stored samples to measure what speculation would have saved.

With a deterministic drafter and exact verification, a draft is accepted up to its first difference from the sampled
tokens, and these are stored. A replay therefore needs no model and runs the same forwards as the real run; only their
seconds come from a cost model. All samples of a wave begin together, as in the collection of a rollout batch, and the
batch shrinks as they end. The first ``past`` samples of each problem are its history, one policy step each, the last
one the newest. The policy does not drift between them, so this history is the best case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import mask_runs
from megatron_dta.sampling.degenerate import DegenerateDetector
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.report import SpeculationReport
from megatron_dta.sampling.speculation.speculator import Speculator


@dataclass(frozen=True)
class RecordedSample:
    """A stored sample, split into given and generated tokens by turn.

    Attributes:
        problem: problem whose history the sample shares.
        prompt: int32 [T], T >= 1.
        generated: int32 [G], the generated tokens of all turns.
        turn_ends: int64 [turns], where each turn ends in ``generated``.
        answers: tokens between two turns that were not generated; one entry fewer than turns.
        stopped: whether the sample was cut because its text degenerated.
    """

    problem: str
    prompt: np.ndarray
    generated: np.ndarray
    turn_ends: np.ndarray
    answers: tuple[np.ndarray, ...]
    stopped: bool = False


def recorded_samples(rollouts: Sequence[Rollout], stop_degenerate: bool = False) -> list[RecordedSample]:
    """Converts rollouts to samples; the loss mask marks the generated tokens."""
    samples = []
    for rollout in rollouts:
        runs = mask_runs(rollout.loss_mask)
        ids = rollout.token_ids
        generated = ids[rollout.loss_mask]
        ends = np.cumsum(runs[:, 1] - runs[:, 0])
        cut = DegenerateDetector().feed(generated) if stop_degenerate else None
        stopped = cut is not None and cut < len(generated)
        if stopped:
            turns = int(np.searchsorted(ends, cut)) + 1
            runs, ends, generated = runs[:turns], np.append(ends[: turns - 1], cut), generated[:cut]
        answers = tuple(ids[a:b] for a, b in zip(runs[:-1, 1], runs[1:, 0], strict=True))
        samples.append(RecordedSample(rollout.group_id, ids[: runs[0, 0]], generated, ends, answers, stopped))
    return samples


def split_history(samples: Sequence[RecordedSample], past: int) -> tuple[list[list[RecordedSample]], list]:
    """(history by step, oldest first; the samples to replay): per problem, ``past`` samples or all but the last one."""
    problems: dict[str, list[RecordedSample]] = {}
    for sample in samples:
        problems.setdefault(sample.problem, []).append(sample)
    history: list[list[RecordedSample]] = [[] for _ in range(past)]
    now = []
    for problem_samples in problems.values():
        count = min(past, len(problem_samples) - 1)
        for i, sample in enumerate(problem_samples[:count]):
            history[past - count + i].append(sample)
        now += problem_samples[count:]
    return history, now


def waves(samples: Sequence[RecordedSample], live_batch: int | None) -> list[list[RecordedSample]]:
    """Splits samples into waves of about ``live_batch``, without splitting problems if possible; None: one wave."""
    if live_batch is None:
        return [list(samples)]
    parts: list[list[RecordedSample]] = []
    count = max(1, round(len(samples) / live_batch))
    begins = [0]
    for i in range(1, count):
        target = round(i * len(samples) / count)
        near = [j for j in range(max(1, target - 16), min(len(samples), target + 17))]
        cuts = [j for j in near if samples[j].problem != samples[j - 1].problem] or [target]
        begins.append(min(cuts, key=lambda j: (abs(j - target), j)))
    for begin, end in zip(begins, [*begins[1:], len(samples)], strict=True):
        if end > begin:
            parts.append(list(samples[begin:end]))
    return parts


def plain_lives(samples: Sequence[RecordedSample]) -> np.ndarray:
    """Number of live samples in each forward of a wave without speculation, int64 [forwards]."""
    lengths = np.sort([len(sample.generated) for sample in samples])
    return len(lengths) - np.searchsorted(lengths, np.arange(lengths[-1]), side="right")


def plain_makespan(samples: Sequence[RecordedSample], cost: ForwardCost) -> float:
    """Seconds of decoding one wave without speculation."""
    return float(cost.seconds(plain_lives(samples)).sum())


def remember(speculator: Speculator, history: Sequence[Sequence[RecordedSample]]) -> None:
    """Add the samples of past steps to a speculator; steps are numbered from 0."""
    for step, samples in enumerate(history):
        for sample in samples:
            slot = speculator.open(sample.problem, sample.prompt)
            begin = 0
            for turn, end in enumerate(sample.turn_ends.tolist()):
                speculator.append(slot, sample.generated[begin:end])
                if turn < len(sample.answers):
                    speculator.append(slot, sample.answers[turn])
                begin = end
            speculator.finish(slot, len(sample.generated))
        speculator.end_step(step)


def replay_wave(
    speculator: Speculator,
    samples: Sequence[RecordedSample],
    step: int,
    burst: int = 1,
) -> SpeculationReport:
    """Decode the samples of one wave with speculation and add them to the trees.

    Args:
        burst: passes without drafts that the engine runs back to back; above 1 it needs samples of one turn.
    """
    slots = np.array([speculator.open(sample.problem, sample.prompt) for sample in samples], np.int64)
    stream = np.concatenate([sample.generated for sample in samples])
    end = np.cumsum([len(sample.generated) for sample in samples])
    position = end - [len(sample.generated) for sample in samples]
    origin, turn = position.copy(), np.zeros(len(samples), np.int64)
    turn_end = origin + [sample.turn_ends[0] for sample in samples]
    live = np.arange(len(samples))
    most = np.full(len(samples), np.iinfo(np.int32).max)
    while len(live):
        proposal = speculator.propose(slots[live], most[live])
        if burst > 1 and not proposal.lengths.any():
            count = np.minimum(min(burst, 4), end[live] - position[live])
            appended = [stream[a : a + n] for a, n in zip(position[live].tolist(), count.tolist(), strict=True)]
            seconds = _burst_seconds(speculator, count)
            speculator.record_burst(slots[live], appended, seconds)
            position[live] += count
            live = _without_ended(speculator, samples, slots, live, position >= end)
            continue
        accepted = _agreement(proposal.tokens, proposal.lengths, stream, position[live], turn_end[live])
        new = np.minimum(accepted + 1, turn_end[live] - position[live])
        offsets = np.concatenate([[0], np.cumsum(new)])
        tokens = stream[np.repeat(position[live] - offsets[:-1], new) + np.arange(offsets[-1])]
        count = len(live) + int(proposal.lengths.sum())
        cost = speculator.gate.drafted_cost
        seconds = float(cost.seconds(count)) + cost.draft * len(proposal.asked)
        speculator.record(proposal, accepted, tokens, offsets, seconds)
        position[live] += new
        live = _without_ended(speculator, samples, slots, live, position >= end)
        for i in live[position[live] == turn_end[live]].tolist():
            speculator.append(slots[i], samples[i].answers[turn[i]])
            turn[i] += 1
            turn_end[i] = origin[i] + samples[i].turn_ends[turn[i]]
    return speculator.end_step(step)


def _burst_seconds(speculator: Speculator, counts: np.ndarray) -> float:
    """Seconds of a burst in which sample i runs in the first ``counts[i]`` passes."""
    lives = len(counts) - np.searchsorted(np.sort(counts), np.arange(counts.max()), side="right")
    return float(speculator.gate.plain_cost.seconds(lives).sum())


def _without_ended(
    speculator: Speculator, samples: Sequence[RecordedSample], slots: np.ndarray, live: np.ndarray, ended: np.ndarray
) -> np.ndarray:
    for i in live[ended[live]].tolist():
        speculator.finish(slots[i])
        speculator.report.stopped += samples[i].stopped
    return live[~ended[live]]


def _agreement(
    drafts: np.ndarray, lengths: np.ndarray, stream: np.ndarray, position: np.ndarray, end: np.ndarray
) -> np.ndarray:
    """Number of leading tokens of each draft that equal the sampled ones, int64 [n]."""
    width = int(lengths.max(initial=0))
    if not width:
        return np.zeros(len(lengths), np.int64)
    ahead = np.arange(width)
    tokens_left = np.minimum(lengths, end - position)
    at = np.minimum(position[:, None] + ahead, len(stream) - 1)
    same = (stream[at] == drafts[:, :width]) & (ahead < tokens_left[:, None])
    return np.logical_and.accumulate(same, axis=1).sum(1)
