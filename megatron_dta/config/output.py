"""What a run reads and leaves on disk: checkpoints and metrics."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class CheckpointConfig:
    """Checkpoints in Megatron's distributed format."""

    save: str | None = option(
        None, "Folder of this run's checkpoints and metrics. If it holds a checkpoint, the run continues from it."
    )
    load: str | None = option(None, "Folder of a checkpoint to start from, while --save holds none.")
    save_interval: int | None = option(None, "Steps between checkpoints; one is always saved at the end.", minimum=1)
    async_save: bool = option(False, "Write checkpoints while training goes on; one counts when it is complete.")
    ckpt_fully_parallel_save: bool | None = option(
        True, "Let all data-parallel ranks write parts of what they hold alike, instead of the first of them all of it."
    )
    keep_checkpoints: int | None = option(
        None, "Keep only so many of the newest checkpoints in --save (default: all).", minimum=1
    )
    keep_best_checkpoint: str | None = option(
        None,
        "Metric of the evaluation, such as eval_reward: save a checkpoint whenever it is better than ever before, and "
        "never delete the best one.",
    )
    best_checkpoint_mode: str | None = option(
        None, "Whether more or less is better (default: less for metrics that end in loss).", choices=("max", "min")
    )
    finetune: bool = option(False, "Take only the weights from --load; optimizer, step and randomness start anew.")
    skip_checkpoint_checks: bool = option(
        False,
        "Load checkpoints without comparing their files with the checksums they were saved with, and from folders that "
        "every user may write to.",
    )
    exit_on_missing_checkpoint: bool = option(False, "Stop if neither --save nor --load holds a checkpoint.")
    hf_checkpoint: str | None = option(
        None,
        "Folder of a Hugging Face checkpoint whose config.json decides the model's settings, and whose tokenizer the "
        "prompts get. Its weights are not loaded.",
    )
    load_hf: str | None = option(
        None,
        "Folder of a Hugging Face checkpoint to start from, while --save holds no checkpoint; its config.json decides "
        "the model's settings.",
    )
    save_hf: str | None = option(
        None,
        "Folder to write the trained model to in Hugging Face's form after the last step; configuration and tokenizer "
        "are those of --load-hf or --hf-checkpoint, or else follow from the run's settings.",
    )
    ref_load: str | None = option(None, "Checkpoint of the KL reference model, instead of what --ref-model says.")
    ref_model: str | None = option(
        None,
        "The KL reference model: the weights this run started from (initial), or the frozen weights under the adapters "
        "of --lora-rank, without a copy of them (base) (default: base with --lora-rank, else initial).",
        choices=("initial", "base"),
    )

    def reference_is_base(self, has_adapters: bool) -> bool:
        """Whether the KL reference is the policy without its adapters."""
        default = "base" if has_adapters else "initial"
        return self.ref_load is None and (self.ref_model or default) == "base"


@dataclass
class LoggingConfig:
    """Metrics: one JSON object per step, TensorBoard, Weights & Biases, and the progress line."""

    dry_run: bool = option(
        False,
        "Check flags, data, tokenizer, rewards, mesh, checkpoints and memory, print what the run would be, and end "
        "without training or writing anything. The environment variable WORLD_SIZE says for how many processes.",
    )
    log_interval: int = option(1, "Steps between progress lines.", minimum=1)
    metrics_file: str | None = option(None, "JSONL file of the metrics (default: metrics.jsonl in --save).")
    eval_interval: int | None = option(None, "Steps between evaluations on held-out data (default: none).", minimum=1)
    eval_iters: int | None = option(
        None, "Evaluate at most this many held-out prompts or rollouts (default: all).", minimum=1
    )
    timeline_dir: str | None = option(
        None, "Write when each pipeline stage ran which segment, planned and measured: JSON, Chrome trace and picture."
    )
    timeline_interval: int = option(100, "Steps between timelines; the second step has one too.", minimum=1)
    save_rollouts_interval: int | None = option(
        None,
        "Steps between saved rollouts: what such a step trains, with its advantages, goes to rollouts/ in --save; the "
        "first step has them too.",
        minimum=1,
    )
    save_rollouts_groups: int = option(4, "Groups of a step that --save-rollouts-interval saves.", minimum=1)
    log_rollout_samples: int = option(
        0,
        "Print this many rollouts of each collection, evenly chosen from the lowest to the highest reward, when a "
        "progress line is due.",
        minimum=0,
    )
    tensorboard_dir: str | None = option(None, "Write TensorBoard events here.")
    wandb_project: str | None = option(None, "Report to this Weights & Biases project; needs the package wandb.")
    wandb_exp_name: str | None = option(None, "Name of the run in Weights & Biases.")
