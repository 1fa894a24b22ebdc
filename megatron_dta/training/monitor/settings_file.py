"""Writes ``SAVE/settings.json``: all settings of a run by flag at its last start, for users and for reports.

Checkpoints hold the settings too, in a form that only PyTorch can read.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dta.config import TrainConfig
from megatron_dta.config.train import settings_by_flag
from megatron_dta.training.checkpoint.files import replace_text

SETTINGS = "settings.json"


def write_settings(folder: str | Path, config: TrainConfig) -> None:
    """Write the settings atomically: a kill leaves either the old file or the new one."""
    replace_text(Path(folder) / SETTINGS, json.dumps(settings_by_flag(config), indent=1) + "\n")
