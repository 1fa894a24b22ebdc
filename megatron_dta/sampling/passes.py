"""Decoding passes of ranks that share experts: all of them run as many, the ranks that are done on no tokens.

In every layer with experts each rank sends tokens to the others and computes theirs, so no rank may run a pass alone.
Before a pass the ranks tell each other on the host who is still decoding; a rank that is done keeps running passes over
no tokens until nobody is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.model import AttentionContext, EmptyContext, Model, current_mesh


class DecodingPasses:
    """Runs ``model``; a context manager, whose end is when all ranks that share experts have come to theirs."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._group = current_mesh().expert_group
        self._device = next(model.parameters()).device

    def __call__(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """One pass, as the model's own call."""
        self._anyone(True)
        return self.model(input_ids, context)

    def __enter__(self) -> DecodingPasses:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Weights that have diverged have done so on all ranks, and each is to say so; other errors leave no way on.
        if kind is not None and not issubclass(kind, FloatingPointError):
            return
        none = torch.zeros(0, dtype=torch.int64, device=self._device)
        while self._anyone(False):
            self.model(none.unsqueeze(0), EmptyContext(position_ids=none))

    def _anyone(self, decodes: bool) -> bool:
        """Whether any of the ranks decodes."""
        if self._group is None:
            return False
        flag = torch.tensor([int(decodes)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)
