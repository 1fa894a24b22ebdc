"""Megatron's experts with the same initial weights as on one process."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class SameOnEveryMesh(SequentialMLP):
    """Experts that run one after another; parameters, checkpoints and adapters are Megatron's.

    On a CPU the random state decides the weights. A rank also draws the weights of the experts before and after its own
    and discards them. Its experts therefore differ from other ranks' experts, and the random state afterwards is the
    same on all ranks.

    Attributes:
        counts_on_host: whether the host has to know the number of rows of each expert.
    """

    counts_on_host = True

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
            # Their gradients are summed over other ranks than those of other weights. Megatron up to 0.16 marks them
            # only if the experts are divided among ranks; undivided experts of a tensor group would then diverge.
            for parameter in self.parameters():
                parameter.allreduce = False
