"""What the routers of one pass know of its tokens besides their hidden states, and what they leave behind.

It travels in the pass's context through every layer. A router notes the experts that it chose at its first forward, and
whatever runs the layer again, Megatron's recomputation or a segment's whole second forward, routes by that note: a
rounding that moved a token to another expert would make the gradient that of another function.

Legend: N tokens of the pass, L layers with experts, E experts, K experts a token is routed to. Under sequence
parallelism a rank's router sees its *rows*: an equal part of the tokens, filled up with rows that stand for no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class BalanceGradient(Protocol):
    """Gives the gradient of the step's balancing loss by the scores of this pass's tokens, when its backward runs."""

    def __call__(self, layer_number: int) -> Tensor:
        """[N, E], for one layer."""


@dataclass
class TokenRouting:
    """Routing of one pass.

    Attributes:
        multiplicity: [N], sequences through each token, which is how often its load counts; None where no load counts.
        z_weights: [N], weight of each token in the z-loss; None where there is none.
        balance: None where there is no balancing loss.
        replay: int [N, L, K], experts that were chosen when the tokens were sampled, -1 where unknown; None if nowhere.
        chosen: by layer number, int16 [rows, K], experts of the first forward.
        balanced: the same for the balancing loss, which looks at the scores alone (no bias, no groups).
        losses: sums so far of "seq_load_balancing_loss" and "z_loss", over layers, coefficients included.
    """

    multiplicity: Tensor | None = None
    z_weights: Tensor | None = None
    balance: BalanceGradient | None = None
    replay: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    balanced: dict[int, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a part of an auxiliary loss; each part reaches this once, in its backward."""
        self.losses[name] = self.losses.get(name, 0) + value.detach()


def rows_of(values: Tensor, rank: int, num_rows: int, fill: int = 0) -> Tensor:
    """The rows [num_rows, ...] of tensor rank ``rank`` in ``values`` [N, ...], ``fill`` where they are no token."""
    part = values[rank * num_rows : (rank + 1) * num_rows]
    missing = num_rows - part.shape[0]
    return F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing), value=fill) if missing else part
