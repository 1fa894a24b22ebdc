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
    """Runs ``model`` in step with the ranks that share experts with this one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._group = current_mesh().expert_group

    def __call__(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """One pass, as the model's own call."""
        self._anyone(True)
        return self._model(input_ids, context)

    def join(self) -> None:
        """Return when every one of the ranks has come here; runs passes over no tokens while some have not."""
        none = torch.zeros(0, dtype=torch.int64, device=next(self._model.parameters()).device)
        while self._anyone(False):
            self._model(none.unsqueeze(0), EmptyContext(position_ids=none))

    def _anyone(self, decodes: bool) -> bool:
        """Whether any of the ranks decodes."""
        if self._group is None:
            return False
        flag = torch.tensor([int(decodes)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)
