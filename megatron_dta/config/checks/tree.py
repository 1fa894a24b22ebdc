"""Settings of memory and costs that do not go together."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_dta.config.train import TrainConfig


def check_tree(config: TrainConfig) -> Iterator[str]:
    """A line for what ``--tree-memory-gib`` decides and is given too, and for models whose costs cannot be measured."""
    tree = config.tree
    if tree.tree_memory_gib is not None:
        for flag, value in (
            ("--tree-memory-tokens", tree.tree_memory_tokens),
            ("--tree-activation-tokens", tree.tree_activation_tokens),
            ("--recompute-granularity", config.model.recompute_granularity),
        ):
            if value is not None:
                yield f"--tree-memory-gib decides what {flag} {value} says; give one of the two"
    for flag, value in (("--tree-memory-gib", tree.tree_memory_gib), ("--cost-model", tree.cost_model)):
        if value is not None and config.model.num_experts is not None:
            yield (
                f"{flag} {value}: does not know experts, whose tokens change from step to step; leave it out with "
                "--num-experts"
            )
