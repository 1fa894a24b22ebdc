"""GRPO against a loop over tokens written from the formulas, gradients by hand; refused settings."""

from __future__ import annotations

import math

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.fields import LossFields
from megatron_dta.core.objectives.registry import make_objective

# Clips alone, each kind of divergence, and all at once.
GRPO_VARIANTS = [
    {},
    {"eps_clip": 0.05, "dual_clip": 1.3},
    {"eps_clip": 1.0, "eps_clip_high": 1e9},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    {"eps_clip_high": 0.3, "dual_clip": 2.5, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.02},
]


def random_case(seed: int, *shape: int) -> tuple[torch.Tensor, torch.Tensor, LossFields]:
    seed_all(seed)
    dtype = torch.float64
    logprobs = -torch.rand(shape, dtype=dtype) * 3
    advantages = torch.randn(shape, dtype=dtype)
    advantages[torch.rand(shape) < 0.1] = 0.0
    fields = LossFields(
        loss_mask=torch.rand(shape) < 0.7,
        advantages=advantages,
        old_logprobs=logprobs + torch.randn(shape, dtype=dtype) * 0.6,
        ref_logprobs=logprobs + torch.randn(shape, dtype=dtype) * 0.5,
    )
    return logprobs.requires_grad_(), (torch.rand(shape, dtype=dtype) * 2).requires_grad_(), fields


def grpo_token(
    logprob: float, entropy: float, advantage: float, old: float, ref: float, options: dict
) -> tuple[float, float, float, str]:
    """(loss, its derivatives by logprob and entropy, branch taken) of one token, straight from the definition."""
    low = 1 - options.get("eps_clip", 0.2)
    high = 1 + options.get("eps_clip_high", options.get("eps_clip", 0.2))
    ratio = math.exp(logprob - old)
    candidates = {"free": ratio * advantage, "clip": min(max(ratio, low), high) * advantage}
    branch = min(candidates, key=lambda name: (candidates[name], name == "clip"))
    surrogate = candidates[branch]
    if branch == "clip":
        branch = "high" if ratio > high else "low"
    if advantage < 0 and "dual_clip" in options and surrogate < options["dual_clip"] * advantage:
        surrogate, branch = options["dual_clip"] * advantage, "dual"
    loss, slope = -surrogate, -ratio * advantage if branch == "free" else 0.0
    coefficient, d = options.get("kl_loss_coef", 0.0), ref - logprob
    kl, kl_slope = {
        "k1": (-d, 1.0),
        "k2": (d * d / 2, -d),
        "k3": (math.exp(d) - 1 - d, 1 - math.exp(d)),
    }[options.get("kl_loss_type", "k3")]
    bonus = options.get("entropy_coef", 0.0)
    return loss + coefficient * kl - bonus * entropy, slope + coefficient * kl_slope, -bonus, branch


@pytest.mark.parametrize("options", GRPO_VARIANTS)
def test_grpo_matches_loop_over_tokens(options: dict) -> None:
    logprobs, entropy, fields = random_case(11, 3, 67)
    losses = make_objective(ObjectiveConfig(**options))(logprobs, entropy, fields)
    gradients = torch.autograd.grad(losses.loss.sum(), (logprobs, entropy), allow_unused=True)
    grad_logprobs, grad_entropy = (torch.zeros_like(logprobs) if g is None else g for g in gradients)
    rtol = 1e-13
    branches = set()
    for b in range(3):
        for t in range(67):
            actual = [x[b, t].item() for x in (losses.loss, grad_logprobs, grad_entropy)]
            if not fields.loss_mask[b, t]:
                assert actual == [0, 0, 0]
                assert all(values[b, t] == 0 for values in losses.metrics.values())
                continue
            inputs = (logprobs, entropy, fields.advantages, fields.old_logprobs, fields.ref_logprobs)
            *expected, branch = grpo_token(*(x[b, t].item() for x in inputs), options)
            branches.add(branch)
            assert actual == pytest.approx(expected, rel=rtol, abs=rtol), (b, t, branch)
            assert losses.metrics["clip_fraction"][b, t].item() == (branch != "free")
    expected_branches = {"free", "low", "high"} if options.get("eps_clip") != 1.0 else {"free"}
    assert branches == expected_branches | ({"dual"} if "dual_clip" in options else set())


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"objective": "a2c"}, "--objective a2c"),
        ({"eps_clip": 0.0}, "--eps-clip 0.0"),
        ({"dual_clip": 1.0}, "--dual-clip 1.0"),
        ({"kl_loss_type": "k4"}, "--kl-loss-type k4"),
    ],
)
def test_senseless_settings_are_refused(settings: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        make_objective(ObjectiveConfig(**settings))
