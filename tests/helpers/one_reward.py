"""The reward of one response, without a scorer."""

from collections.abc import Mapping
from typing import Any

from megatron_dta.sampling.rewards.registry import Response, RewardFunction, compute_score


def compute_reward(
    function: RewardFunction, prompt_id: str, record: Mapping[str, Any], response: str, response_token_ids: list[int]
) -> float:
    """The checked reward; ``InputError`` names the prompt and shows the response."""
    return compute_score(function, Response(prompt_id, record, response, response_token_ids)).reward
