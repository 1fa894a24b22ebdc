"""Settings of stored rollouts and of the batches taken from them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.core.config.options import option


@dataclass
class DataConfig:
    """Stored rollouts, and the rollouts that one step trains."""

    rollouts: list[str] | None = option(
        None,
        "Stored rollouts to train on (.jsonl, .parquet or .npz). With --tokenizer-type also text (.jsonl, .parquet): "
        "conversations for --objective sft, chosen and rejected answers for --objective dpo.",
    )
    eval_rollouts: list[str] | None = option(
        None, "Held-out stored rollouts; their loss is reported.", needs=("rollouts", "eval_interval")
    )
    rollout_sample_granularity: str = option(
        "trajectory",
        "Whether a training sample is a whole trajectory or one assistant turn.",
        choices=("trajectory", "turn"),
        needs="rollouts",
    )
    seq_length: int | None = option(
        None,
        "Longest training sequence; longer stored sequences are cut (default: --max-position-embeddings).",
        minimum=2,
        needs="rollouts",
    )
    global_batch_size: int | None = option(
        None,
        "Rollouts per optimizer step; groups are kept whole (default when sampling: all sampled rollouts, divided by "
        "--num-steps-per-rollout).",
        minimum=1,
    )
