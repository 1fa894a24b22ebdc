"""Synchronizes decoding passes among ranks that share experts.

In a layer with experts each rank sends tokens to the others and computes theirs, so no rank can run a pass alone.
Before each pass the ranks exchange on the host whether they are still decoding. A rank that has finished runs passes
over no tokens until all have finished.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dta.model import AttentionContext, EmptyContext, Model, current_mesh


class DecodingPasses:
    """Runs the passes of ``model`` together with the ranks that share experts with this one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._group = current_mesh().expert_group

    def __call__(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Run one pass; arguments and result are those of the model."""
        self._any_decodes(True)
        return self._model(input_ids, context)

    def join(self) -> None:
        """Run passes over no tokens until all ranks have called this."""
        none = torch.zeros(0, dtype=torch.int64, device=next(self._model.parameters()).device)
        while self._any_decodes(False):
            self._model(none.unsqueeze(0), EmptyContext(position_ids=none))

    def _any_decodes(self, decodes: bool) -> bool:
        """Whether any rank decodes."""
        if self._group is None:
            return False
        flag = torch.tensor([int(decodes)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self._group)
        return bool(flag)
