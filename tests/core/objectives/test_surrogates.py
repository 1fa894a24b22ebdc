"""Surrogates, corrections, pairs and the value loss as functions: GRPO token by token, masks, extreme numbers."""

import math
from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.dpo import preference_pairs
from megatron_dta.core.objectives.fields import LossFields
from megatron_dta.core.objectives.registry import make_objective, make_value_objective
from megatron_dta.core.planning.step.sample import FIELDS

CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.3}
TIS = {"use_tis": True, "tis_clip": 1.3, "tis_clip_low": 0.6}
OBJECTIVES = {
    "sft": make_objective(ObjectiveConfig(objective="sft")),
    "ppo": make_objective(ObjectiveConfig(objective="ppo", kl_loss_coef=0.1, entropy_coef=0.02, **CLIP)),
    "gspo": make_objective(ObjectiveConfig(objective="gspo", **CLIP)),
    "gspo-token": make_objective(ObjectiveConfig(objective="gspo-token", dual_clip=2.0, **CLIP)),
    "cispo": make_objective(ObjectiveConfig(objective="cispo", **CLIP)),
    "truncated": make_objective(ObjectiveConfig(**TIS)),
    "masked": make_objective(ObjectiveConfig(objective="gspo", tis_mode="mask", tis_level="sequence", **TIS)),
    "dpo": make_objective(ObjectiveConfig(objective="dpo")),
    "value": make_value_objective(0.2),
    "value without clip": make_value_objective(None),
}

# Clips alone, each kind of divergence, and all at once.
GRPO_VARIANTS = [
    {},
    {"eps_clip": 0.05, "dual_clip": 1.3},
    {"eps_clip": 1.0, "eps_clip_high": 1e9},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    {"eps_clip_high": 0.3, "dual_clip": 2.5, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.02},
]


def random_case(seed: int, *shape: int, spread: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, LossFields]:
    seed_all(seed)
    logprobs = -torch.rand(shape, dtype=torch.float64) * 3
    fields = {name: logprobs + torch.randn(shape, dtype=torch.float64) * spread for name in FIELDS}
    fields["advantages"] = torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    return logprobs.requires_grad_(), torch.rand(shape, dtype=torch.float64), LossFields(mask, **fields)


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
    kl, kl_slope = {"k1": (-d, 1.0), "k2": (d * d / 2, -d), "k3": (math.exp(d) - 1 - d, 1 - math.exp(d))}[
        options.get("kl_loss_type", "k3")
    ]
    bonus = options.get("entropy_coef", 0.0)
    return loss + coefficient * kl - bonus * entropy, slope + coefficient * kl_slope, -bonus, branch


@pytest.mark.parametrize("options", GRPO_VARIANTS)
def test_grpo_matches_loop_over_tokens(options: dict) -> None:
    logprobs, entropy, fields = random_case(11, 3, 67, spread=0.6)
    entropy.requires_grad_()
    losses = make_objective(ObjectiveConfig(**options))(logprobs, entropy, fields)
    gradients = torch.autograd.grad(losses.loss.sum(), (logprobs, entropy), allow_unused=True)
    grad_logprobs, grad_entropy = (torch.zeros_like(logprobs) if g is None else g for g in gradients)
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
            assert actual == pytest.approx(expected, rel=1e-13, abs=1e-13), (b, t, branch)
            assert losses.metrics["clip_fraction"][b, t].item() == (branch != "free")
    expected_branches = {"free", "low", "high"} if options.get("eps_clip") != 1.0 else {"free"}
    assert branches == expected_branches | ({"dual"} if "dual_clip" in options else set())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_read_where_nothing_is_trained(name: str) -> None:
    poison = math.nan
    logprobs, entropy, fields = random_case(1, 3, 19)
    clean = OBJECTIVES[name](logprobs, entropy, fields)
    (expected,) = torch.autograd.grad(clean.loss.sum(), logprobs)
    bad = {key: torch.where(fields.loss_mask, getattr(fields, key), poison) for key in FIELDS}
    bad_logprobs = torch.where(fields.loss_mask, logprobs.detach(), poison).requires_grad_()
    bad_entropy = torch.where(fields.loss_mask, entropy, poison)
    spoiled = OBJECTIVES[name](bad_logprobs, bad_entropy, LossFields(fields.loss_mask, **bad))
    (gradient,) = torch.autograd.grad(spoiled.loss.sum(), bad_logprobs)
    assert torch.equal(spoiled.loss, clean.loss)
    assert torch.equal(gradient, expected)
    assert (gradient[~fields.loss_mask] == 0).all()
    for kind in ("metrics", "maxima"):
        for key, values in getattr(clean, kind).items():
            assert torch.equal(getattr(spoiled, kind)[key], values), key
            assert not values.requires_grad
            assert (values[~fields.loss_mask] == 0).all()


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo-token", "cispo", "truncated", "masked"])
def test_a_recorded_logprob_far_from_the_trainers_leaves_the_loss_finite(name: str, advantage: float) -> None:
    logprobs = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    far = torch.full((3,), -1000.0, dtype=torch.float64)
    near = torch.zeros(3, dtype=torch.float64)
    fields = LossFields(torch.ones(3, dtype=torch.bool), torch.full((3,), advantage), far, near, far * 2)
    if name == "truncated":  # the sampler's ratio overflows, the policy's does not
        fields = replace(fields, old_logprobs=near, rollout_logprobs=far)
    losses = OBJECTIVES[name](logprobs, near, fields)
    (gradient,) = torch.autograd.grad(losses.loss.sum(), logprobs)
    assert torch.isfinite(losses.loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["ppo", "gspo", "gspo-token", "cispo", "truncated", "value", "dpo"])
def test_a_nan_of_the_model_stays(name: str) -> None:
    logprobs, entropy, fields = random_case(6, 7)
    fields.loss_mask[:] = True
    with torch.no_grad():
        logprobs[3] = math.nan
    assert OBJECTIVES[name](logprobs, entropy, fields).loss.isnan().any()


def test_missing_fields_are_refused() -> None:
    logprobs, entropy, fields = random_case(7, 5)
    for name, without, message in (
        ("truncated", "rollout_logprobs", "--use-tis needs"),
        ("dpo", "pair_gradient", "needs pairs"),
        ("value", "returns", "needs returns"),
        ("ppo", "advantages", "needs advantages"),
        ("ppo", "ref_logprobs", "--kl-loss-coef above 0 needs the logprobs of a reference"),
    ):
        with pytest.raises(InputError, match=message):
            OBJECTIVES[name](logprobs, entropy, replace(fields, **{without: None}))


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


# --------------------------------------------------------------------------------------------------------------- pairs


def test_pairs_are_of_one_group_and_differ() -> None:
    rng = seed_all(8)
    rewards = rng.integers(0, 3, 40).astype(float)
    groups = [str(g) for g in rng.integers(0, 9, 40)]
    every = preference_pairs(rewards, groups, "all")
    expected = {(i, j) for i in range(40) for j in range(40) if groups[i] == groups[j] and rewards[i] > rewards[j]}
    assert {tuple(pair) for pair in every.tolist()} == expected
    assert len(every) == len(expected)
    best = preference_pairs(rewards, groups, "best-worst")
    assert {tuple(pair) for pair in best.tolist()} <= expected
    for group in set(groups):
        members = [i for i in range(40) if groups[i] == group]
        pairs_of_group = [pair for pair in best.tolist() if groups[pair[0]] == group]
        spread = max(rewards[members]) > min(rewards[members])
        assert len(pairs_of_group) == spread
        if spread:
            assert rewards[pairs_of_group[0][0]] == max(rewards[members])
            assert rewards[pairs_of_group[0][1]] == min(rewards[members])
    assert preference_pairs([], []).shape == (0, 2)
