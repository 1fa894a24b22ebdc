"""Builds the loss function from the settings of a run.

A new objective is a function, an entry here, and its name in the choices of ``ObjectiveConfig.objective``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.objective import ObjectiveConfig
from megatron_dta.core.objectives.corrections import CORRECTION_LEVELS, CORRECTION_MODES, Correction
from megatron_dta.core.objectives.dpo import dpo_loss, pair_terms
from megatron_dta.core.objectives.fields import Objective
from megatron_dta.core.objectives.policy import KL_TYPES, Regularization, policy_loss
from megatron_dta.core.objectives.sft import sft_loss
from megatron_dta.core.objectives.surrogates import SURROGATES, Clip
from megatron_dta.core.objectives.value import value_loss


def _make_policy(config: ObjectiveConfig) -> Objective:
    _check_policy(config)
    correction = None
    if config.use_tis:
        correction = Correction(config.tis_mode, config.tis_level, config.tis_clip_low, config.tis_clip)
    function = partial(
        policy_loss,
        surrogate=SURROGATES[config.objective],
        clip=Clip(config.eps_clip, config.eps_clip_high, config.dual_clip),
        correction=correction,
        terms=Regularization(config.kl_loss_coef, config.kl_loss_type, config.entropy_coef),
    )
    needs_critic = config.objective == "ppo"
    return Objective(
        config.objective,
        function,
        # A critic learns from rewards, which advantages in the rollouts do not contain.
        requires=("reward",) if needs_critic else ("reward|advantages",),
        needs_ref_logprobs=config.kl_loss_coef != 0 or config.kl_coef != 0,
        is_policy_gradient=True,
        needs_critic=needs_critic,
    )


def _make_dpo(config: ObjectiveConfig) -> Objective:
    if not 0 < config.dpo_beta < float("inf"):
        raise InputError(f"--dpo-beta {config.dpo_beta}: must be above 0")
    pair_function = partial(pair_terms, beta=config.dpo_beta)
    return Objective("dpo", dpo_loss, requires=("reward",), needs_ref_logprobs=True, pair_function=pair_function)


OBJECTIVES: dict[str, Callable[[ObjectiveConfig], Objective]] = {
    "sft": lambda config: Objective("sft", sft_loss),
    "dpo": _make_dpo,
    **dict.fromkeys(SURROGATES, _make_policy),
}


def make_objective(config: ObjectiveConfig) -> Objective:
    """The objective of ``config``; raises ``InputError`` with the flag of an invalid value."""
    if config.objective not in OBJECTIVES:
        raise InputError(f"--objective {config.objective}: choose from {', '.join(sorted(OBJECTIVES))}")
    return OBJECTIVES[config.objective](config)


def make_value_objective(value_clip: float | None) -> Objective:
    """The loss of a critic."""
    return Objective("value", partial(value_loss, value_clip=value_clip))


def _check_policy(config: ObjectiveConfig) -> None:
    """Raise ``InputError`` for invalid settings. Comparisons are written so that NaN fails them."""
    if not 0 < config.eps_clip <= 1:
        raise InputError(f"--eps-clip {config.eps_clip}: must be above 0 and at most 1")
    if config.eps_clip_high is not None and not config.eps_clip_high > 0:
        raise InputError(f"--eps-clip-high {config.eps_clip_high}: must be above 0")
    if config.dual_clip is not None and not config.dual_clip > 1:
        raise InputError(f"--dual-clip {config.dual_clip}: must be above 1")
    if config.dual_clip is not None and config.objective == "cispo":
        raise InputError("--dual-clip has no effect with --objective cispo, which clips every weight; leave it out")
    if config.kl_loss_type not in KL_TYPES:
        raise InputError(f"--kl-loss-type {config.kl_loss_type}: choose from {', '.join(KL_TYPES)}")
    if config.tis_mode not in CORRECTION_MODES:
        raise InputError(f"--tis-mode {config.tis_mode}: choose from {', '.join(CORRECTION_MODES)}")
    if config.tis_level not in CORRECTION_LEVELS:
        raise InputError(f"--tis-level {config.tis_level}: choose from {', '.join(CORRECTION_LEVELS)}")
    if not 0 <= config.tis_clip_low < config.tis_clip:
        raise InputError(f"--tis-clip-low {config.tis_clip_low}: must be at least 0 and below --tis-clip")
    for flag, value in (
        ("--kl-loss-coef", config.kl_loss_coef),
        ("--kl-coef", config.kl_coef),
        ("--entropy-coef", config.entropy_coef),
    ):
        if not 0 <= value < float("inf"):
            raise InputError(f"{flag} {value}: must be 0 or above")
