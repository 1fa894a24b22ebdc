"""``SAVE/settings.json``: all settings of a run by flag, as of its last start, for people and for reports.

A checkpoint has the settings too, in a form that only PyTorch reads.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dta.config import TrainConfig
from megatron_dta.config.train import settings_by_flag
from megatron_dta.training.checkpoint.files import replace_text

SETTINGS = "settings.json"


def write_settings(folder: str | Path, config: TrainConfig) -> None:
    """Write them; a kill leaves the old file or the new one."""
    replace_text(Path(folder) / SETTINGS, json.dumps(settings_by_flag(config), indent=1) + "\n")
