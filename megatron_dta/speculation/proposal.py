"""The drafts of one forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_dta.speculation.suffix_forest import Drafts


@dataclass(frozen=True)
class Proposal:
    """Drafts to verify in one forward: the first ``lengths[i]`` tokens of ``tokens[i]`` for row i, often none.

    Attributes:
        slots: int64 [n]. tokens: int32 [n, width]. lengths: int64 [n].
        asked: int64 [q], rows for which a draft was requested.
        drafts: the drafts of these rows, before the gate.
    """

    slots: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    asked: np.ndarray
    drafts: Drafts
