"""Synchronizes decoding passes among ranks that share experts.

In a layer with experts each rank sends tokens to the others and computes theirs, so no rank can run a pass alone.
Before each pass the ranks exchange on the host how many tokens they decode in it; the largest number is the size of the
blocks that they exchange. A rank that has finished runs passes over no tokens until all have finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.hybrid.path_states import NoTokens, PathStates
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model


@dataclass
class EmptyContext(AttentionContext):
    """A pass over no tokens, which only joins the collective operations of the ranks in every layer."""

    path_states: PathStates | None = field(default_factory=NoTokens)

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return query + key.sum() + value.sum()


class DecodingPasses:
    """Runs the passes of ``model`` together with the ranks that share experts with this one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._group = current_mesh().expert_group

    def __call__(self, input_ids: Tensor, context: AttentionContext) -> Tensor:
        """Run one pass; arguments and result are those of the model."""
        tokens = self._most_tokens(input_ids.shape[1])
        if tokens is not None:
            context.rows_per_rank = self._model.model_chunks[0].stage_shape(tokens)[0]
        return self._model(input_ids, context)

    def join(self) -> None:
        """Run passes over no tokens until all ranks have called this."""
        none = torch.zeros(0, dtype=torch.int64, device=next(self._model.parameters()).device)
        while tokens := self._most_tokens(0):
            rows = self._model.model_chunks[0].stage_shape(tokens)[0]
            self._model(none.unsqueeze(0), EmptyContext(position_ids=none, rows_per_rank=rows))

    def _most_tokens(self, num_tokens: int) -> int | None:
        """Maximum number of tokens of any rank's next pass, 0 if no rank decodes; None if this rank runs its passes
        alone.
        """
        if self._group is None:
            return None
        most = torch.tensor([num_tokens])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(most)
