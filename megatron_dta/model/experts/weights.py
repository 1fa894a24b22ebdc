"""Megatron's experts, each with the first weights that it would have on one process."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class SameOnEveryMesh(SequentialMLP):
    """Experts one after another; parameters, checkpoints and adapters are Megatron's.

    On a CPU the random state decides the weights. A rank draws those of the experts before and after its own too and
    drops them, so its experts differ from other ranks', and what is drawn next is the same on all.
    """

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, submodules: Any, pg_collection: Any, **names: Any
    ) -> None:
        rank, size = pg_collection.ep.rank(), pg_collection.ep.size()
        others = num_local_experts if config.use_cpu_initialization and size > 1 else 0
        shape = copy.copy(config)
        shape.ffn_hidden_size = config.moe_ffn_hidden_size

        def draw(num_experts: int) -> None:
            for _ in range(num_experts):
                MLP(
                    shape,
                    submodules,
                    is_expert=True,
                    ffn_hidden_size=config.moe_ffn_hidden_size,
                    tp_group=pg_collection.expt_tp,
                )

        draw(rank * others)
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **names)
        draw((size - 1 - rank) * others)
        if pg_collection.expt_tp.size() != pg_collection.tp.size():
            # Their gradients are summed over other ranks than the rest's. Up to 0.16 Megatron says so only where the
            # experts are divided among ranks, and lets whole ones on the ranks of a tensor group drift apart.
            for parameter in self.parameters():
                parameter.allreduce = False
