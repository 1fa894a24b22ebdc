"""Carries the routers' per-token inputs and outputs of one pass.

It is part of the pass's context in every layer. At its first forward, a router stores the experts that it chose. Every
recomputation of the layer, Megatron's or a segment's whole second forward, routes by these stored experts: if rounding
moved a token to another expert, the gradient would be that of another function.

Legend: N tokens of the pass, L layers with experts, E experts, K experts of each token. Under sequence
and context parallelism, the router of a rank sees its *rows*: an equal share of the tokens, padded with rows that
correspond to no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class BalanceGradient(Protocol):
    """Computes the gradient of the step's balancing loss by the scores of the pass's tokens, in the pass's backward."""

    def __call__(self, layer_number: int) -> Tensor:
        """[N, E], for one layer."""


@dataclass
class TokenRouting:
    """Routing of one pass.

    Attributes:
        multiplicity: [N], number of sequences through each token, by which its load counts; None if no load counts.
        z_weights: [N], weight of each token in the z-loss; None without a z-loss.
        balance: None without a balancing loss.
        replay: int [N, L, K], experts chosen when the tokens were sampled, -1 where unknown; None if all are unknown.
        chosen: by layer number, int16 [rows, K], experts of the first forward.
        balanced: the same for the balancing loss, which uses the scores alone (no bias, no groups).
        context_rank: the rank's share of the tokens, where a context group divides them.
        losses: sums so far of "seq_load_balancing_loss" and "z_loss", over layers, coefficients included.
    """

    multiplicity: Tensor | None = None
    z_weights: Tensor | None = None
    balance: BalanceGradient | None = None
    replay: Tensor | None = None
    chosen: dict[int, Tensor] = field(default_factory=dict)
    balanced: dict[int, Tensor] = field(default_factory=dict)
    context_rank: int = 0
    losses: dict[str, Tensor] = field(default_factory=dict)

    def add_loss(self, name: str, value: Tensor) -> None:
        """Add a term of an auxiliary loss; the backward adds each term once."""
        self.losses[name] = self.losses.get(name, 0) + value.detach()


def rows_of(values: Tensor, rank: int, num_rows: int, fill: int = 0) -> Tensor:
    """The rows [num_rows, ...] of share number ``rank`` of ``values`` [N, ...], with ``fill`` in padding rows."""
    part = values[rank * num_rows : (rank + 1) * num_rows]
    missing = num_rows - part.shape[0]
    return F.pad(part, (0, 0) * (part.dim() - 1) + (0, missing), value=fill) if missing else part
