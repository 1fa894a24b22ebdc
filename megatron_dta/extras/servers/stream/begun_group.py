"""What is sampled of a group that is not finished, and its form in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megatron_dta.extras.servers.sampled_tokens import SampledTokens
from megatron_dta.sampling.interface import FinishReason, GenerationResult

_ARRAYS = ("token_ids", "logprobs", "versions")


@dataclass
class BegunGroup:
    """A group of which no reward is known yet.

    Attributes:
        version: of the newest weights when it began.
        results: its finished requests, by their place among the samples.
        responses: the tokens so far of others.
    """

    version: int
    results: dict[int, GenerationResult] = field(default_factory=dict)
    responses: dict[int, SampledTokens] = field(default_factory=dict)

    def packed(self) -> dict[str, Any]:
        """Tensors, numbers and strings."""
        samples = [_packed(sample, response) for sample, response in self.responses.items()]
        for sample, result in self.results.items():
            tokens = SampledTokens(result.token_ids, result.logprobs, result.token_versions)
            samples.append(
                _packed(sample, tokens) | {"request": result.request_id, "finish": result.finish_reason.value}
            )
        return {"version": self.version, "samples": samples}


def unpacked(packed: dict[str, Any]) -> BegunGroup:
    """The group that ``BegunGroup.packed`` packed."""
    group = BegunGroup(packed["version"])
    for sample in packed["samples"]:
        response = SampledTokens(*(sample[name].numpy() for name in _ARRAYS))
        if "finish" not in sample:
            group.responses[sample["number"]] = response
            continue
        group.results[sample["number"]] = GenerationResult(
            sample["request"],
            response.token_ids,
            response.logprobs,
            FinishReason(sample["finish"]),
            int(response.versions.min()),
            token_versions=response.versions,
        )
    return group


def _packed(sample: int, response: SampledTokens) -> dict[str, Any]:
    arrays = {name: torch.from_numpy(np.array(getattr(response, name))) for name in _ARRAYS}
    return {"number": sample, **arrays}
