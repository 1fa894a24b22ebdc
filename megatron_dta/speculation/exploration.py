"""Selects rare, short drafts to verify against the gate's decision, which updates the acceptance estimates.

A hash of (seed, key, position) selects the samples, so all ranks agree.
"""

from __future__ import annotations

import numpy as np

from megatron_dta.speculation.forward_cost import ForwardCost

EXPLORED_TOKENS = 4
LONELY = 24
"""Of the forwards without other drafts, every ``LONELY``-th one explores."""
_EXPLORING_SHARE = 0.004
"""Maximum cost of exploration as a share of a forward."""
_LONELY_DRAFTS = 4
"""Exploratory drafts in a forward that would otherwise have none."""


def exploring_share(exploration: float, cost: ForwardCost, live: int, is_lonely_turn: bool) -> float:
    """Share of the samples that explore, such that they cost at most ``_EXPLORING_SHARE`` of a forward."""
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
