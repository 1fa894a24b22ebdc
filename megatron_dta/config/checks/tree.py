"""Checks the settings of memory and costs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.config.train import TrainConfig


def check_tree(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each flag that ``--tree-memory-gib`` decides itself, and for models without a cost model."""
    tree = config.tree
    if tree.tree_memory_gib is not None:
        for flag, value in (
            ("--tree-memory-tokens", tree.tree_memory_tokens),
            ("--tree-activation-tokens", tree.tree_activation_tokens),
            ("--recompute-granularity", config.model.recompute_granularity),
        ):
            if value is not None:
                yield f"--tree-memory-gib conflicts with {flag} {value}, which it decides itself; keep one of them"
    for flag, value in (("--tree-memory-gib", tree.tree_memory_gib), ("--cost-model", tree.cost_model)):
        if value is not None and config.model.num_experts is not None:
            yield (
                f"{flag} {value}: does not support experts, whose tokens change from step to step; leave it out with "
                "--num-experts"
            )
