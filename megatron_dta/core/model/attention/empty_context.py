"""A pass without tokens, by which a rank takes part in what other ranks compute together."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megatron_dta.core.model.attention.context import AttentionContext
from megatron_dta.core.model.hybrid.path_states import NoTokens, PathStates


@dataclass
class EmptyContext(AttentionContext):
    """A pass over no tokens, which only joins the collective operations of the ranks in every layer."""

    path_states: PathStates | None = field(default_factory=NoTokens)

    def attend(self, layer_number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return query + key.sum() + value.sum()
