"""Settings of checkpoints, metrics and logging."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from megatron_dta.core.config.options import NO_FLAG, option

save_option = partial(option, needs="save")


@dataclass
class CheckpointConfig:
    """Checkpoints in Megatron's distributed format."""

    save: str | None = option(
        None, "Folder for this run's checkpoints and metrics. If it contains a checkpoint, the run resumes from it."
    )
    load: str | None = option(None, "Folder of a checkpoint to start from if --save contains none.")
    save_interval: int | None = save_option(
        None, "Steps between checkpoints; one is always saved at the end.", minimum=1
    )
    async_save: bool = save_option(
        False, "Write checkpoints in the background during training; a checkpoint counts once it is complete."
    )
    ckpt_fully_parallel_save: bool | None = save_option(
        True,
        "Let all data-parallel ranks write parts of their replicated state, instead of the first rank all of it.",
        flag=NO_FLAG,
    )
    keep_checkpoints: int | None = save_option(
        None, "Number of newest checkpoints kept in --save (default: all).", minimum=1
    )
    keep_best_checkpoint: str | None = option(
        None,
        "Evaluation metric, such as eval_reward: save a checkpoint whenever it reaches a new best value, and never "
        "delete the best checkpoint.",
        needs=("eval_interval", "save"),
    )
    finetune: bool = option(
        False, "Load only the weights from --load; optimizer, step and random state start afresh.", needs="load"
    )
    skip_checkpoint_checks: bool = option(
        False,
        "Load checkpoints without comparing their files with the saved checksums, also from folders that other users "
        "may write to.",
    )
    hf_checkpoint: str | None = option(
        None,
        "Folder of a Hugging Face checkpoint whose config.json determines the model's settings and whose tokenizer is"
        " used for prompts. Its weights are not loaded.",
    )
    load_hf: str | None = option(
        None,
        "Folder of a Hugging Face checkpoint to start from if --save contains no checkpoint; its config.json "
        "determines the model's settings.",
    )
    save_hf: str | None = option(
        None,
        "Folder to which the trained model is written in Hugging Face format after the last step. Configuration and "
        "tokenizer are those of --load-hf or --hf-checkpoint, or else follow from the run's settings.",
    )
    ref_load: str | None = option(
        None,
        "Checkpoint of the KL reference model (default: the frozen weights under the adapters of --lora-rank, or a "
        "copy of the weights from which this run started).",
        needs="kl_loss_coef or kl_coef or objective=dpo",
    )

    def reference_is_base(self, has_adapters: bool) -> bool:
        """Whether the KL reference model is the policy without its adapters."""
        return self.ref_load is None and has_adapters


@dataclass
class LoggingConfig:
    """Metrics: one JSON object per step, TensorBoard, Weights & Biases, and the progress line."""

    dry_run: bool = option(
        False,
        "Check flags, data, tokenizer, rewards, mesh, checkpoints and memory, print a summary of the run, and exit "
        "without training or writing anything. The environment variable WORLD_SIZE gives the number of processes.",
    )
    log_interval: int = option(1, "Steps between progress lines.", minimum=1)
    eval_interval: int | None = option(None, "Steps between evaluations on held-out data (default: none).", minimum=1)
    eval_iters: int | None = option(
        None,
        "Evaluate at most this many held-out prompts or rollouts (default: all).",
        minimum=1,
        needs="eval_interval",
    )
    timeline_dir: str | None = option(
        None,
        "Folder for timelines of the segments that each pipeline stage ran, planned and measured: traces for the "
        "report, Perfetto and chrome://tracing.",
    )
    save_rollouts_interval: int | None = save_option(
        None,
        "Steps between saved rollouts. The rollouts that such a step trains are written with their advantages to "
        "rollouts/ in --save; the first step always saves them.",
        minimum=1,
    )
    tensorboard_dir: str | None = option(None, "Folder for TensorBoard events.")
    wandb_project: str | None = option(None, "Report to this Weights & Biases project; needs the package wandb.")
