"""Rare, short drafts against the gate's advice, which keep the estimates of acceptance alive.

Which samples explore is a hash of (seed, key, position), so all ranks agree.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.speculation.forward_cost import ForwardCost

EXPLORED_TOKENS = 4
LONELY = 24
"""Where a forward has no other drafts, only every ``LONELY`` th explores."""
_EXPLORING_SHARE = 0.004
_LONELY_DRAFTS = 4
"""Drafts of a forward that has none but for exploring: enough to learn as much from these few."""


def exploring_share(exploration: float, cost: ForwardCost, live: int, is_lonely_turn: bool) -> float:
    """Which share of the samples explores: so few that they cost no more than ``_EXPLORING_SHARE`` of a forward."""
    exploring = max(cost.per_token, 1e-12) * EXPLORED_TOKENS
    share = min(exploration, _EXPLORING_SHARE * float(cost.seconds(live)) / live / exploring)
    return max(share, min(_LONELY_DRAFTS / live, share * LONELY)) if is_lonely_turn else share


def keyed_share(seed: int, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [n] in [0, 1), evenly distributed, from the samples' keys and positions (int64 [n])."""
    mixed = _mix(_mix(keys.astype(np.uint64) ^ np.uint64(seed)) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014), uint64."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
