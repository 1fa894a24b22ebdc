"""Rollout sets of the AReaL-DTA experiment, each as one sample per trajectory and as one sample per turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_turns

VOCABULARY = 500  # of generated rollouts


@dataclass(frozen=True)
class RolloutSet:
    """The same rollouts in both granularities.

    Attributes:
        trajectories, turns: the samples; the samples of a trajectory's turns are prefixes of it.
        most: largest token id.
    """

    name: str
    trajectories: list[TrainingSample]
    turns: list[TrainingSample]
    most: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(sample.token_ids) for sample in self.trajectories)

    def samples(self, granularity: str) -> list[TrainingSample]:
        """The samples of "trajectory" or "turn"."""
        return self.turns if granularity == "turn" else self.trajectories


def load_set(path: Path, count: int | None, renumber: bool) -> RolloutSet:
    """The first ``count`` trajectories of a file, or all, and all turns of these."""
    trajectories = load_rollouts(path, max_sequences=count)
    turns = load_rollouts(path, sample_granularity="turn")
    names = list(dict.fromkeys(turn.trajectory_id for turn in turns))
    chosen = set(names[: len(trajectories)])
    turns = [turn for turn in turns if turn.trajectory_id in chosen]
    return _as_set(path.name.split(".")[0], trajectories, turns, renumber)


def generated_set(seed: int, groups: int, trials: int, turns: int, scale: int) -> RolloutSet:
    """Random trajectories shaped like an agent's.

    All share a system prompt of 8 ``scale`` tokens, and the trials of a group its task's 4 ``scale``. A turn is an
    observation that is not trained and an action that is, of up to 2 ``scale`` tokens each. Half of the trials continue
    from the first turns of an earlier one, as tree sampling does.
    """
    generator = np.random.default_rng(seed)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(0, VOCABULARY, count, dtype=np.int32)

    system, trajectories = tokens(8 * scale), []
    for group in range(groups):
        prompt = np.concatenate([system, tokens(4 * scale)])
        paths: list[list[np.ndarray]] = []
        for trial in range(trials):
            kept = int(generator.integers(1, turns)) if trial % 2 else 0
            parts = paths[trial // 2][: 2 * kept] if kept else []
            for _ in range(max(1, int(generator.integers(turns // 2, turns + 1)) - kept)):
                parts += [tokens(int(generator.integers(1, 2 * scale + 1))) for _ in range(2)]
            paths.append(parts)
            trained = [np.full(len(part), index % 2 == 1) for index, part in enumerate(parts)]
            mask = np.concatenate([np.zeros(len(prompt), bool), *trained])
            trajectories.append(Rollout(np.concatenate([prompt, *parts]), mask, group_id=str(group)))
    cut = [turn for i, rollout in enumerate(trajectories) for turn in cut_turns(rollout, str(i))]
    return _as_set(f"generated, {groups} tasks x {trials}", trajectories, cut, renumber=False)


def _as_set(name: str, trajectories: Sequence[Rollout], turns: Sequence[Rollout], renumber: bool) -> RolloutSet:
    """Samples of both granularities; ``renumber``: number the tokens that occur from 0, which keeps the forest."""
    vocabulary = np.unique(np.concatenate([rollout.token_ids for rollout in [*trajectories, *turns]]))

    def sample(rollout: Rollout) -> TrainingSample:
        ids = rollout.token_ids
        return TrainingSample(
            np.searchsorted(vocabulary, ids).astype(ids.dtype) if renumber else ids, np.asarray(rollout.loss_mask)
        )

    most = len(vocabulary) - 1 if renumber else int(vocabulary[-1])
    return RolloutSet(name, [sample(rollout) for rollout in trajectories], [sample(rollout) for rollout in turns], most)
