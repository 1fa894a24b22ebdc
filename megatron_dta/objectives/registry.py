"""From the settings of a run to its loss function. A new objective is a function and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from megatron_dta.errors import InputError
from megatron_dta.objectives.fields import Objective
from megatron_dta.objectives.grpo import KL_TYPES, grpo_loss
from megatron_dta.objectives.sft import sft_loss


class ObjectiveSettings(Protocol):
    """The settings that are read, see ``config.ObjectiveConfig``; the flags have their names."""

    objective: str
    eps_clip: float
    eps_clip_high: float | None
    dual_clip: float | None
    kl_loss_coef: float
    kl_loss_type: str
    entropy_coef: float


def _make_sft(config: ObjectiveSettings) -> Objective:
    return Objective("sft", sft_loss)


def _make_grpo(config: ObjectiveSettings) -> Objective:
    _check_grpo(config)
    function = partial(
        grpo_loss,
        eps_clip=config.eps_clip,
        eps_clip_high=config.eps_clip_high,
        dual_clip=config.dual_clip,
        kl_loss_coef=config.kl_loss_coef,
        kl_loss_type=config.kl_loss_type,
        entropy_coef=config.entropy_coef,
    )
    return Objective(
        "grpo",
        function,
        requires=("reward|advantages",),
        needs_ref_logprobs=config.kl_loss_coef != 0,
        uses_entropy=config.entropy_coef != 0,
    )


OBJECTIVES: dict[str, Callable[[ObjectiveSettings], Objective]] = {"grpo": _make_grpo, "sft": _make_sft}


def make_objective(config: ObjectiveSettings) -> Objective:
    """The objective of ``config``; ``InputError`` names the flag of a value that makes no sense."""
    if config.objective not in OBJECTIVES:
        raise InputError(f"--objective {config.objective}: choose from {', '.join(sorted(OBJECTIVES))}")
    return OBJECTIVES[config.objective](config)


def _check_grpo(config: ObjectiveSettings) -> None:
    """Comparisons are written so that NaN fails them."""
    if not 0 < config.eps_clip <= 1:
        raise InputError(f"--eps-clip {config.eps_clip}: must be above 0 and at most 1")
    if config.eps_clip_high is not None and not config.eps_clip_high > 0:
        raise InputError(f"--eps-clip-high {config.eps_clip_high}: must be above 0")
    if config.dual_clip is not None and not config.dual_clip > 1:
        raise InputError(f"--dual-clip {config.dual_clip}: must be above 1")
    if config.kl_loss_type not in KL_TYPES:
        raise InputError(f"--kl-loss-type {config.kl_loss_type}: choose from {', '.join(KL_TYPES)}")
    for flag, value in (("--kl-loss-coef", config.kl_loss_coef), ("--entropy-coef", config.entropy_coef)):
        if not 0 <= value < float("inf"):
            raise InputError(f"{flag} {value}: must be 0 or above")
