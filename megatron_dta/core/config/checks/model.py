"""Checks of a model's shape that concern all families."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig


def check_rotary(model: ModelConfig) -> None:
    """Reject rotary positions that cannot be computed, and two scalings at once."""
    rotated = int(model.kv_channels * model.rotary_percent)
    if rotated == 0 or rotated % 2:
        raise InputError(
            f"--rotary-percent {model.rotary_percent} rotates {rotated} of {model.kv_channels} channels per head; "
            "this must be an even number above 0; change --rotary-percent or --kv-channels"
        )
    scalings = {
        "--position-embedding-type yarn": model.position_embedding_type == "yarn",
        "--use-rope-scaling": model.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": model.rotary_seq_len_interpolation_factor is not None,
    }
    given = [flag for flag, present in scalings.items() if present]
    if len(given) > 1:
        raise InputError(f"{given[0]} and {given[1]} are two scalings of the rotary positions; keep one of them")
    low, high = model.rope_scaling_low_freq_factor, model.rope_scaling_high_freq_factor
    if low >= high:
        raise InputError(
            f"--rope-scaling-low-freq-factor {low:g} must be below --rope-scaling-high-freq-factor {high:g}"
        )
    if model.yarn_beta_slow > model.yarn_beta_fast:
        raise InputError(
            f"--yarn-beta-slow {model.yarn_beta_slow:g} must not be above --yarn-beta-fast {model.yarn_beta_fast:g}"
        )


def check_dropout(model: ModelConfig) -> None:
    """Reject any dropout; the model is not built with it either."""
    for flag, value in (("--attention-dropout", model.attention_dropout), ("--hidden-dropout", model.hidden_dropout)):
        if value != 0:
            raise InputError(
                f"{flag} {value}: must be 0, because sequences that share a prefix would share its dropout mask, "
                "unlike sequences trained separately"
            )
