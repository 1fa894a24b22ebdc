"""Rejects a shape of the model that cannot be computed."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig


def check_rotary(model: ModelConfig) -> None:
    """Raise ``InputError`` for rotary positions of half a channel and for bounds of YaRN in the wrong order."""
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated == 0 or rotated % 2:
        raise InputError(
            f"rotary_percent {model.rotary_percent} rotates {rotated} of {model.kv_channels} channels per head; this "
            "must be an even number above 0; change it in config.json, or give another --kv-channels"
        )
    if model.yarn_beta_slow > model.yarn_beta_fast:
        raise InputError(
            f"yarn_beta_slow {model.yarn_beta_slow:g} must not be above yarn_beta_fast {model.yarn_beta_fast:g}"
        )
