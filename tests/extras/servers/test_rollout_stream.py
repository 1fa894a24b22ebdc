"""The stream of groups at all speeds: bounds of their age, and every group taken once."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.extras.servers.stream.begun_group import BegunGroup, unpacked
from megatron_dta.extras.servers.stream.rollout_stream import RolloutStream, StreamLimits
from megatron_dta.sampling.interface import FinishReason, GenerationResult


class Sampler:
    """Groups of two rollouts whose first tokens are sampled at once and which take random times to finish."""

    samples, last_failure = 2, ""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self.version = rng, -1
        self._open: dict[int, tuple[float, int]] = {}
        self.submitted: list[int] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def update(self, version: int, weights: None) -> None:
        self.version = version

    def begin(self) -> None:
        assert not self._open

    def submit(self, group: int, begun: BegunGroup) -> None:
        self.submitted.append(group)
        for number in (2 * group, 2 * group + 1):
            if number - 2 * group in begun.results:
                continue
            # A few take far longer than a step.
            seconds = self._rng.random() * (0.01 if self._rng.random() < 0.8 else 0.08)
            self._open[number] = time.monotonic() + seconds, self.version

    def sampled_so_far(self) -> dict[int, dict[int, SampledTokens]]:
        return {}

    def sample_of(self, request_id: int) -> tuple[int, int]:
        return divmod(request_id, 2)

    def poll(self, seconds: float) -> list[SimpleNamespace]:
        time.sleep(0.001)
        done = [number for number, (end, _) in self._open.items() if end < time.monotonic()]
        return [SimpleNamespace(request_id=n, versions=[-1, self._open.pop(n)[1], self.version]) for n in done]

    def score(self, group: int, results: list[SimpleNamespace]) -> list[Rollout]:
        mask = [False, True, True]
        return [Rollout([1, 2, 3], mask, group_id=str(group), token_versions=result.versions) for result in results]

    def statistics(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("seed", range(8))
def test_every_group_is_taken_once(seed: int) -> None:
    rng = seed_all(seed)
    steps, bound, groups, total = int(rng.integers(1, 3)), int(rng.integers(2, 5)), 3, 12
    limits = StreamLimits(groups, steps, bound, total)
    sampler = Sampler(rng)
    stream = RolloutStream(sampler, sampler.update, limits)
    step, taken_groups, dropped, state = 0, [], 0.0, {}
    for number in range(total):
        if number == total // 2:
            # Another process resumes from the saved state.
            state = stream.state_dict()
            stream.close()
            sampler = Sampler(rng)
            stream = RolloutStream(sampler, sampler.update, limits)
            stream.load_state_dict(state)
        stream.offer(step, None)
        batch = None
        while batch is None:
            batch = stream.take(number, step, 0.02)
        rollouts, statistics = batch
        dropped += statistics["stale_rollouts"]
        assert len({rollout.group_id for rollout in rollouts}) == groups
        assert all(0 <= step - rollout.policy_version <= bound for rollout in rollouts)
        taken_groups += [int(rollout.group_id) for rollout in rollouts]
        time.sleep(rng.random() * 0.01)
        step += steps
    stream.close()
    end = stream.state_dict()
    left = {*end["finished"], *end["unfinished"]}
    assert len(taken_groups) == len(set(taken_groups)) * 2
    assert not left & set(taken_groups)
    assert not set(range(end["next_group"])) - left - set(taken_groups)
    assert dropped == 0
    assert set(state["unfinished"]) <= set(sampler.submitted)


def test_what_is_sampled_of_a_group_survives_a_file(tmp_path: Path) -> None:
    rng = seed_all(2)

    def tokens(count: int) -> SampledTokens:
        sampled = SampledTokens()
        for version in (4, 5):
            ids, logprobs = rng.integers(0, 99, count).astype(np.int32), -rng.random(count).astype(np.float32)
            sampled = sampled.extended(ids, logprobs, version)
        return sampled

    finished, part = tokens(3), tokens(2)
    result = GenerationResult(
        17, finished.token_ids, finished.logprobs, FinishReason.LENGTH, 4, token_versions=finished.versions
    )
    torch.save(BegunGroup(4, {1: result}, {3: part}).packed(), tmp_path / "group")
    group = unpacked(torch.load(tmp_path / "group", weights_only=True))
    assert group.version == 4
    assert group.results[1].request_id == 17
    assert group.results[1].finish_reason is FinishReason.LENGTH
    assert group.results[1].policy_version == 4
    kept = SampledTokens(group.results[1].token_ids, group.results[1].logprobs, group.results[1].token_versions)
    for sent, read in ((finished, kept), (part, group.responses[3])):
        for name in ("token_ids", "logprobs", "versions"):
            assert getattr(sent, name).dtype == getattr(read, name).dtype
            assert np.array_equal(getattr(sent, name), getattr(read, name))


def test_groups_that_are_dropped_as_too_old_are_replaced() -> None:
    """The stream was full and idle, so nothing but the dropping tells its thread that there is work again."""
    sampler = Sampler(seed_all(1))
    stream = RolloutStream(sampler, sampler.update, StreamLimits(1, 1, 1, num_rollout_batches=2))

    def take(number: int, step: int) -> tuple[list[Rollout], dict[str, float]] | None:
        end = time.monotonic() + 60
        while (batch := stream.take(number, step, 0.02)) is None and time.monotonic() < end:
            pass
        return batch

    stream.offer(0, None)
    assert take(0, 0) is not None
    end = time.monotonic() + 60
    while not stream.state_dict()["finished"] and time.monotonic() < end:
        time.sleep(0.001)
    stream.offer(5, None)
    while sampler.version != 5 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.2)  # until the thread waits for work again
    last = take(1, 5)
    stream.close()
    assert last is not None
    assert last[1]["stale_rollouts"] == 2
    assert all(rollout.policy_version == 5 for rollout in last[0])
