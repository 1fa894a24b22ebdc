"""Opens the files that a run writes beside its checkpoints: metrics and rollouts."""

from __future__ import annotations

from pathlib import Path

from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.sampling.prompts.tokenizer import Tokenizer
from megatron_dta.sampling.task import SamplingTask
from megatron_dta.training.config import LoggingConfig, TrainConfig
from megatron_dta.training.config.train import settings_by_flag
from megatron_dta.training.data.saved_rollouts import RolloutFiles
from megatron_dta.training.data.stored import stored_tokenizer
from megatron_dta.training.monitor.metrics import MetricsLog, write_settings


def metrics_path(config: TrainConfig) -> Path | None:
    """The path of the run's metrics file; None without --save."""
    return Path(config.checkpoint.save) / "metrics.jsonl" if config.checkpoint.save is not None else None


def open_metrics(config: TrainConfig, iteration: int) -> MetricsLog:
    """Open the metrics log. All processes have the same metrics; rank 0 writes them and the settings file."""
    if current_mesh().rank != 0:
        return MetricsLog(None, LoggingConfig(), iteration)
    if config.checkpoint.save is not None:
        write_settings(config.checkpoint.save, settings_by_flag(config))
    return MetricsLog(metrics_path(config), config.logging, iteration, settings_by_flag(config))


def open_rollout_files(config: TrainConfig, task: SamplingTask | None) -> RolloutFiles | None:
    """The writer of rollout files on rank 0; None on other ranks, which have the same samples, or if it is off."""
    folder, interval = config.checkpoint.save, config.logging.save_rollouts_interval
    if folder is None or interval is None or current_mesh().rank != 0:
        return None
    return RolloutFiles(folder, interval, tokenizer_of(config, task))


def tokenizer_of(config: TrainConfig, task: SamplingTask | None) -> Tokenizer | None:
    """The tokenizer that decodes rollouts for files."""
    return task.tokenizer if task is not None else stored_tokenizer(config)
