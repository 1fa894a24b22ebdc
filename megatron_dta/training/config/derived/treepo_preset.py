"""Expands ``--treepo-preset`` into the settings of the TreePO paper (section 4 and its released settings).

A preset fills in only the settings that the user does not give. Values that depend on other settings adapt to them, so
that no check rejects a flag that was never given: a smaller batch is oversampled three-fold as well, an objective
without a dual clip gets none, and an environment, which decides when a rollout is over, gets no answer pattern.
"""

from __future__ import annotations

from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.config.treepo import TreePOConfig
from megatron_dta.training.config.checks.objectives import POLICY_GRADIENT
from megatron_dta.training.config.optimization import OptimizationConfig

WIDTH, BATCH, MINI_BATCH, OVERSAMPLING, OVERLONG_BUFFER, WARMUP = 16, 512, 32, 3, 512, 10


def add_treepo_preset(given: dict[str, Any]) -> dict[str, Any]:
    """``given`` (settings by field name), completed by the settings of its preset.

    Raises:
        InputError: the given response length does not exceed the segment length of the preset.
    """
    name = given.get("treepo_preset")
    known = TreePOConfig.__dataclass_fields__["treepo_preset"].metadata["choices"]
    # If no trees are sampled, the checks report what the preset needs.
    grown = given.get("rollout_method", "treepo") == "treepo" and "rollouts" not in given
    if name is None or name not in known or not grown:
        return given
    return {**treepo_preset(name, given), **given}


def treepo_preset(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Settings of ``--treepo-preset name`` by field name, adapted to the settings ``given``."""
    init, _, shape = name.partition("-")
    depth, length = map(int, shape.split("x"))
    longest = given.get("rollout_max_response_len", depth * length)
    if longest <= length and "treepo_segment_length" not in given and given.get("treepo_branch_at") != "turn":
        raise InputError(
            f"--treepo-preset {name} has segments of {length} tokens, and --rollout-max-response-len {longest} does "
            "not exceed that, so no path would branch; raise it, or choose a preset with shorter segments"
        )
    width = given.get("n_samples_per_prompt", WIDTH)
    first = given.get("treepo_initial_branches", min(2, width))
    return {
        "rollout_method": "treepo",
        "n_samples_per_prompt": WIDTH,
        "rollout_max_response_len": longest,
        "treepo_segment_length": length,
        "treepo_max_depth": depth,
        "treepo_branching_factor": 2,
        "treepo_initial_branches": first,
        "treepo_initial_branches_max": max(first, min(8, width)) if init == "more" else None,
        "treepo_answer_pattern": None if given.get("environment") is not None else "boxed",
        "treepo_repetition_count": 8,
        "treepo_repetition_segments": 1,
        "treepo_fallback": "finished",
        **_loss(given),
        **_batches(given, width),
        **({"overlong_buffer_len": OVERLONG_BUFFER} if longest > OVERLONG_BUFFER else {}),
        **_schedule(given),
    }


def _loss(given: dict[str, Any]) -> dict[str, Any]:
    objective = given.get("objective", "grpo")
    if objective not in POLICY_GRADIENT:
        return {}
    low = given.get("eps_clip", 0.2)
    loss: dict[str, Any] = {"eps_clip": low, "eps_clip_high": max(low, 0.28)}
    if objective != "ppo":  # its critic estimates advantages
        loss["advantage_estimator"] = "treepo"
    if objective != "cispo":  # it clips every weight
        loss["dual_clip"] = 10.0
    return loss


def _batches(given: dict[str, Any], width: int) -> dict[str, Any]:
    """512 prompts per rollout batch, three times as many sampled, 32 prompts per step."""
    batch = given.get("rollout_batch_size", BATCH)
    found: dict[str, Any] = {"rollout_batch_size": batch}
    if not given.get("dynamic_sampling") and width > 1:
        found["over_sampling_batch_size"] = OVERSAMPLING * batch
    step = given.get("global_batch_size", MINI_BATCH * width)
    if batch * width % step == 0 and batch % max(1, batch * width // step) == 0:
        found["num_steps_per_rollout"] = batch * width // step
    return found


def _schedule(given: dict[str, Any]) -> dict[str, Any]:
    rate = OptimizationConfig.__dataclass_fields__
    iterations = given.get("lr_decay_iters", given.get("train_iters", rate["train_iters"].default))
    return {"lr": 1e-6, **({"lr_warmup_iters": WARMUP} if iterations > WARMUP else {})}
