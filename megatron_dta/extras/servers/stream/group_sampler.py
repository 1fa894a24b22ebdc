"""Samples and scores single groups on servers, for ``RolloutStream``: a prompt with all of its samples."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.extras.servers.engine import HttpEngine
from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.extras.servers.stream.begun_group import BegunGroup
from megatron_dta.sampling.config import SamplingConfig
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult
from megatron_dta.sampling.prompts.load import prompts_at
from megatron_dta.sampling.rewards.scoring import counted
from megatron_dta.sampling.sources.independent import sampling_params, to_rollouts
from megatron_dta.sampling.task import SamplingTask


class GroupSampler:
    """Samples groups by number; the number decides the prompt and the random numbers.

    Attributes:
        samples: rollouts of a group.
        num_open: requests that are not finished.
    """

    def __init__(self, engine: HttpEngine, task: SamplingTask, config: SamplingConfig, seed: int) -> None:
        self._engine, self._task, self._seed = engine, task, seed
        self._params = sampling_params(task.tokenizer, config, seed)
        self.samples, self.num_open = config.n_samples_per_prompt, 0
        self._before = task.scorer.tally

    def begin(self) -> None:
        """Begin, or begin again after something else has used the engine."""
        self._engine.start(self._params, 0)

    def submit(self, group: int, begun: BegunGroup) -> None:
        """Send the requests of a group that are not finished."""
        prompt = prompts_at(self._task.prompts, group, 1, self._seed)[0]
        most, first = self._params.max_response_tokens, group * self.samples
        numbers = [first + sample for sample in range(self.samples) if sample not in begun.results]
        # A continued run may have a lower cap.
        so_far = {first + sample: response for sample, response in begun.responses.items() if len(response) < most}
        self._engine.submit(
            [GenerationRequest(number, prompt.token_ids, most, key=number) for number in numbers], so_far
        )
        self.num_open += len(numbers)

    def sampled_so_far(self) -> dict[int, dict[int, SampledTokens]]:
        """The tokens of unfinished requests, by group and place; any thread may call this."""
        by_group: dict[int, dict[int, SampledTokens]] = {}
        for number, response in self._engine.sampled_so_far().items():
            group, sample = self.sample_of(number)
            by_group.setdefault(group, {})[sample] = response
        return by_group

    def sample_of(self, request_id: int) -> tuple[int, int]:
        """The group of a request, and which of its samples it is."""
        return divmod(request_id, self.samples)

    def poll(self, seconds: float) -> list[GenerationResult]:
        """The requests that are finished; waits up to ``seconds`` for the first one."""
        results = self._engine.poll_for(seconds)
        self.num_open -= len(results)
        return results

    def score(self, group: int, results: Sequence[GenerationResult]) -> list[Rollout]:
        """The rollouts of a group, without those whose reward has failed; one thread at a time."""
        prompt = prompts_at(self._task.prompts, group, 1, self._seed)[0]
        responses = self._task.responses([prompt] * len(results), [result.token_ids for result in results])
        rewards = self._task.scorer.score(responses)
        name = f"{group}:{prompt.prompt_id}"
        pairs = zip(results, rewards, strict=True)
        return to_rollouts([(prompt, result, reward, name) for result, reward in pairs if reward is not None])

    @property
    def last_failure(self) -> str:
        """Why the last reward failed."""
        return self._task.scorer.last_failure

    def statistics(self) -> dict[str, float]:
        """The scorer's counts since the last call."""
        before, self._before = self._before, self._task.scorer.tally
        return counted(before, self._before, lambda tally: [tally])
