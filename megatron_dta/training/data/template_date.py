"""Fixes the date that a chat template writes: once for a run, for all its ranks and continuations.

The date is the checkpoint's that the run continues, or else the time at which
the first rank starts. It is part of the settings, which every checkpoint has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from megatron_dta.core.model.parallel.mesh import current_mesh, initialize_parallel
from megatron_dta.sampling.prompts.chat_template import may_write_date
from megatron_dta.training.checkpoint.files import starting_point
from megatron_dta.training.checkpoint.reader import read_common, saved_settings
from megatron_dta.training.config import TrainConfig


def with_template_date(config: TrainConfig, report: Callable[[str], None]) -> tuple[TrainConfig, torch.device | None]:
    """The settings with ``chat_template_date`` if the template writes a date.

    Returns:
        the settings, and the device of this process if the ranks had to agree on a date, for which the mesh is set up.
    """
    device, date = None, config.sampling.chat_template_date
    if not config.sampling.apply_chat_template or not may_write_date(config.sampling.tokenizer_model or ""):
        return config, None
    start, resumes = starting_point(config.checkpoint)
    if date is None and start is not None and resumes:
        date = _saved_date(start)
    if date is None:
        date = datetime.now().isoformat(timespec="seconds")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            device = initialize_parallel(config.optimization.seed, config.parallel)
            date = current_mesh().gather_from_all(date)[0]
    report(f"the chat template writes the date or the time: {date} in the whole run")
    return replace(config, sampling=replace(config.sampling, chat_template_date=date)), device


def with_date_of(config: TrainConfig, checkpoint: Path | None) -> TrainConfig:
    """The settings of a tool that samples as the run of ``checkpoint`` does."""
    if checkpoint is None or not config.sampling.apply_chat_template or config.sampling.chat_template_date is not None:
        return config
    return replace(config, sampling=replace(config.sampling, chat_template_date=_saved_date(checkpoint)))


def _saved_date(checkpoint: Path) -> str | None:
    """The date in a checkpoint's settings; None if its run had none."""
    date = (saved_settings(checkpoint, read_common(checkpoint)) or {}).get("--chat-template-date")
    return date if isinstance(date, str) else None
