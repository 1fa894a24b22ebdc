"""Checks the settings of memory and tree attention."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.training.config.train import TrainConfig


def check_tree(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each flag that ``--tree-memory-gib`` decides itself."""
    tree = config.tree
    if tree.tree_memory_gib is not None:
        for flag, value in (
            ("--tree-memory-tokens", tree.tree_memory_tokens),
            ("--tree-activation-tokens", tree.tree_activation_tokens),
            ("--recompute-granularity", config.model.recompute_granularity),
        ):
            if value is not None:
                yield f"--tree-memory-gib conflicts with {flag} {value}, which it decides itself; keep one of them"
