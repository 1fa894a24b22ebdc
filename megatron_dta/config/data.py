"""Where rollouts come from: stored files, or sampling on the training weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class DataConfig:
    """Stored rollouts and how a step's rollouts are chosen."""

    rollouts: list[str] | None = option(
        None,
        "Train on these stored rollouts (.jsonl, .parquet or .npz), or on text (with --tokenizer-type): conversations "
        "for --objective sft, chosen and rejected answers for --objective dpo (.jsonl, .parquet).",
    )
    eval_rollouts: list[str] | None = option(None, "Held-out stored rollouts; their loss is reported.")
    rollout_sample_granularity: str = option(
        "trajectory",
        "One training sample per trajectory, or one per assistant turn.",
        choices=("trajectory", "turn"),
    )
    seq_length: int | None = option(
        None, "Longest training sequence; stored ones are cut (default: --max-position-embeddings).", minimum=2
    )
    global_batch_size: int | None = option(
        None,
        "Rollouts in one optimizer step; groups are kept whole (default when sampling: all those sampled).",
        minimum=1,
    )
