"""Objectives against loops over tokens written from the formulas; gradients by hand and by finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.fields import LossFields, TokenLosses
from megatron_dta.core.objectives.policy import Regularization, policy_loss
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.objectives.sft import sft_loss
from megatron_dta.core.objectives.surrogates import Clip

# Every option alone and all at once.
GRPO_VARIANTS = [
    {},
    {"eps_clip_high": 0.4},
    {"eps_clip": 0.05, "dual_clip": 1.3},
    {"eps_clip": 1.0, "eps_clip_high": 1e9},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k2"},
    {"kl_loss_coef": 0.3, "kl_loss_type": "k3"},
    {"entropy_coef": 0.7},
    {"eps_clip_high": 0.3, "dual_clip": 2.5, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coef": 0.02},
]


def random_case(
    seed: int, *shape: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, LossFields]:
    seed_all(seed)
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


def grpo_loss(
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    fields: LossFields,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
    **terms: object,
) -> TokenLosses:
    clip = Clip(eps_clip, eps_clip_high, dual_clip)
    return policy_loss(logprobs, entropy, fields, clip=clip, terms=Regularization(**terms))


def gradients(losses: TokenLosses, *inputs: torch.Tensor, weights: torch.Tensor | None = None) -> list[torch.Tensor]:
    total = (losses.loss if weights is None else losses.loss * weights).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("options", GRPO_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grpo_matches_loop_over_tokens(options: dict, dtype: torch.dtype) -> None:
    logprobs, entropy, fields = random_case(11, 3, 67, dtype=dtype)
    losses = grpo_loss(logprobs, entropy, fields, **options)
    assert losses.loss.dtype == dtype
    grad_logprobs, grad_entropy = gradients(losses, logprobs, entropy)
    rtol = 1e-13 if dtype == torch.float64 else 3e-6
    taken = set()
    for b in range(3):
        for t in range(67):
            actual = [x[b, t].item() for x in (losses.loss, grad_logprobs, grad_entropy)]
            if not fields.loss_mask[b, t]:
                assert actual == [0, 0, 0]
                assert all(values[b, t] == 0 for values in losses.metrics.values())
                continue
            inputs = (logprobs, entropy, fields.advantages, fields.old_logprobs, fields.ref_logprobs)
            *expected, branch = grpo_token(*(x[b, t].item() for x in inputs), options)
            taken.add(branch)
            assert actual == pytest.approx(expected, rel=rtol, abs=rtol), (b, t, branch)
            assert losses.metrics["clip_fraction"][b, t].item() == (branch != "free")
    expected_branches = {"free", "low", "high"} if options.get("eps_clip") != 1.0 else {"free"}
    assert taken == expected_branches | ({"dual"} if "dual_clip" in options else set())


@pytest.mark.parametrize("options", GRPO_VARIANTS)
def test_grpo_gradients_by_finite_differences(options: dict) -> None:
    logprobs, entropy, fields = random_case(12, 2, 9)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        # The entropy enters with factor 0 where no option uses it, which gradcheck needs.
        return grpo_loss(logprobs, entropy, fields, **options).loss + 0 * entropy

    assert torch.autograd.gradcheck(loss, (logprobs, entropy))
    assert torch.autograd.gradcheck(lambda x: sft_loss(x, entropy, fields).loss, (logprobs,))


@pytest.mark.parametrize("ratio", [0.1, 0.8 - 1e-9, 0.8 + 1e-9, 1.0, 1.2 - 1e-9, 1.2 + 1e-9, 2.9, 3.1])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 2.0])
def test_each_clip_branch(ratio: float, advantage: float) -> None:
    """The textbook table of PPO's clip with a dual clip at 3."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    fields = LossFields(torch.ones(1, dtype=torch.bool), torch.tensor([advantage]).double(), torch.zeros(1).double())
    losses = grpo_loss(logprobs, torch.zeros(1), fields, dual_clip=3.0)
    if advantage > 0:
        surrogate, cut = (1.2 * advantage, True) if ratio > 1.2 else (ratio * advantage, False)
    elif advantage < 0:
        surrogate, cut = (0.8 * advantage, True) if ratio < 0.8 else (ratio * advantage, False)
        surrogate, cut = (3.0 * advantage, True) if ratio > 3 else (surrogate, cut)
    else:
        surrogate, cut = 0.0, False
    assert losses.loss.item() == pytest.approx(-surrogate, rel=1e-14)
    slope = 0.0 if cut else -ratio * advantage
    assert gradients(losses, logprobs)[0].item() == pytest.approx(slope, rel=1e-14, abs=1e-300)
    assert losses.metrics["clip_fraction"].item() == cut


def test_metrics_match_loop() -> None:
    logprobs, entropy, fields = random_case(13, 41)
    metrics = grpo_loss(logprobs, entropy, fields, kl_loss_coef=0.1, kl_loss_type="k2").metrics
    assert set(metrics) == {"ratio", "ratio_bounded", "clip_fraction", "approx_kl", "entropy", "ref_kl"}
    for t in range(41):
        if not fields.loss_mask[t]:
            continue
        difference = logprobs[t].item() - fields.old_logprobs[t].item()
        assert metrics["ratio"][t].item() == pytest.approx(math.exp(difference), rel=1e-13)
        assert metrics["approx_kl"][t].item() == pytest.approx(math.exp(difference) - 1 - difference, rel=1e-12)
        assert metrics["entropy"][t].item() == entropy[t].item()
        assert metrics["ref_kl"][t].item() == pytest.approx((logprobs - fields.ref_logprobs)[t].item() ** 2 / 2)
    assert not any(values.requires_grad for values in metrics.values())
    assert "ref_kl" not in grpo_loss(logprobs, entropy, fields).metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_policy_ratio_is_exactly_one(dtype: torch.dtype) -> None:
    logprobs, entropy, fields = random_case(14, 2, 33, dtype=dtype)
    fields = replace(fields, old_logprobs=None)
    losses = grpo_loss(logprobs, entropy, fields)
    masked_advantages = torch.where(fields.loss_mask, fields.advantages, 0)
    assert torch.equal(losses.metrics["ratio"], fields.loss_mask.to(dtype))
    assert torch.equal(losses.loss, -masked_advantages)
    assert torch.equal(gradients(losses, logprobs)[0], -masked_advantages)


def test_sft_is_the_masked_negative_logprob() -> None:
    logprobs, entropy, fields = random_case(15, 2, 33)
    losses = sft_loss(logprobs, entropy, LossFields(fields.loss_mask))
    assert torch.equal(losses.loss, torch.where(fields.loss_mask, -logprobs, 0))
    assert torch.equal(gradients(losses, logprobs)[0], -fields.loss_mask.double())
    assert torch.equal(losses.metrics["entropy"], torch.where(fields.loss_mask, entropy, 0))


@pytest.mark.parametrize("options", [None, *GRPO_VARIANTS])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_poison_where_nothing_is_trained(options: dict | None, poison: float) -> None:
    """Any rubbish at masked positions: losses, metrics and gradients are bitwise those without it, and 0 there."""
    logprobs, entropy, fields = random_case(16, 3, 29)
    loss_mask = fields.loss_mask
    function = sft_loss if options is None else lambda *a: grpo_loss(*a, **options)
    clean = function(logprobs, entropy, fields)

    def spoil(values: torch.Tensor) -> torch.Tensor:
        return torch.where(loss_mask, values.detach(), poison).requires_grad_()

    bad_logprobs, bad_entropy = spoil(logprobs), spoil(entropy)
    names = ("advantages", "old_logprobs", "ref_logprobs")
    bad_fields = LossFields(loss_mask, **{name: spoil(getattr(fields, name)).detach() for name in names})
    spoiled = function(bad_logprobs, bad_entropy, bad_fields)
    assert torch.equal(spoiled.loss, clean.loss)
    for name, values in clean.metrics.items():
        assert torch.equal(spoiled.metrics[name], values), name
    for actual, expected in zip(
        gradients(spoiled, bad_logprobs, bad_entropy), gradients(clean, logprobs, entropy), strict=True
    ):
        assert torch.equal(actual, expected)
        assert (actual[~loss_mask] == 0).all()


@pytest.mark.parametrize("options", [None, GRPO_VARIANTS[-1]])
def test_batch_equals_one_by_one(options: dict | None) -> None:
    """Rectangular batches with padding and any leading axes give what each sequence gives alone."""
    lengths = [1, 17, 5, 30, 30, 2]
    logprobs, entropy, fields = random_case(17, 6, 30)
    for row, length in enumerate(lengths):
        fields.loss_mask[row, length:] = False
    function = sft_loss if options is None else lambda *a: grpo_loss(*a, **options)
    batch = function(logprobs, entropy, fields)
    grad_batch = gradients(batch, logprobs, entropy)
    cube = [x.reshape(2, 3, 30) for x in (logprobs, entropy)]
    given = {name: value for name, value in vars(fields).items() if value is not None}
    cube_fields = LossFields(**{name: value.reshape(2, 3, 30) for name, value in given.items()})
    assert torch.equal(function(*cube, cube_fields).loss.reshape(6, 30), batch.loss)
    for row, length in enumerate(lengths):
        x, h = (v[row, :length].detach().requires_grad_() for v in (logprobs, entropy))
        alone = function(x, h, LossFields(**{name: value[row, :length] for name, value in given.items()}))
        torch.testing.assert_close(alone.loss, batch.loss[row, :length], rtol=1e-14, atol=0)
        for actual, expected in zip(gradients(alone, x, h), grad_batch, strict=True):
            torch.testing.assert_close(actual, expected[row, :length], rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_overflowing_ratio(dtype: torch.dtype) -> None:
    """exp(log ratio) would be inf: no gradient, and a finite loss also where no clip bounds it."""
    logprobs = torch.zeros(4, dtype=dtype, requires_grad=True)
    advantages = torch.tensor([2.0, 0.0, -1.0, -1.0], dtype=dtype)
    fields = LossFields(torch.ones(4, dtype=torch.bool), advantages, torch.full((4,), -1000.0, dtype=dtype))
    losses = grpo_loss(logprobs, torch.zeros(4), fields, dual_clip=3.0)
    torch.testing.assert_close(losses.loss, torch.tensor([-2.4, 0, 3, 3], dtype=dtype))
    assert torch.equal(gradients(losses, logprobs)[0], torch.zeros(4, dtype=dtype))
    losses = grpo_loss(logprobs, torch.zeros(4), fields)
    torch.testing.assert_close(losses.loss, torch.tensor([-2.4, 0, math.exp(20), math.exp(20)], dtype=dtype))
    assert torch.equal(gradients(losses, logprobs)[0], torch.zeros(4, dtype=dtype))
    assert losses.metrics["ratio_bounded"].tolist() == [1] * 4
    fields = replace(fields, old_logprobs=torch.tensor([-19.0, -21.0, 19.0, 21.0], dtype=dtype))
    assert grpo_loss(logprobs, torch.zeros(4), fields).metrics["ratio_bounded"].tolist() == [0, 1, 0, 1]
    # A reference far above the policy: k3 would be infinite.
    fields = replace(fields, ref_logprobs=torch.full((4,), 1000.0, dtype=dtype))
    assert torch.isfinite(grpo_loss(logprobs, torch.zeros(4), fields, kl_loss_coef=0.1).loss).all()


def test_nan_of_the_model_is_not_hidden() -> None:
    for advantage in (-1.0, 0.0, 1.0):
        logprobs = torch.tensor([math.nan], requires_grad=True)
        fields = LossFields(torch.ones(1, dtype=torch.bool), torch.tensor([advantage]), torch.zeros(1))
        assert torch.isnan(grpo_loss(logprobs, torch.zeros(1), fields).loss).all()


def test_gradient_of_clipped_tokens_still_has_penalties() -> None:
    fields = LossFields(torch.ones(1, dtype=torch.bool), torch.ones(1), torch.tensor([-2.0]), torch.tensor([-1.5]))
    logprobs, entropy = torch.tensor([-1.0], requires_grad=True), torch.tensor([0.5], requires_grad=True)
    losses = grpo_loss(logprobs, entropy, fields, kl_loss_coef=2.0, kl_loss_type="k2", entropy_coef=0.25)
    assert losses.metrics["clip_fraction"].item() == 1
    assert [x.item() for x in gradients(losses, logprobs, entropy)] == pytest.approx([2.0 * 0.5, -0.25])


# ---------------------------------------------------------------------------------------------------- from settings


@pytest.mark.parametrize("options", GRPO_VARIANTS)
def test_make_objective_passes_every_setting(options: dict) -> None:
    logprobs, entropy, fields = random_case(18, 2, 31)
    objective = make_objective(ObjectiveConfig(**options))
    actual, expected = objective(logprobs, entropy, fields), grpo_loss(logprobs, entropy, fields, **options)
    assert torch.equal(actual.loss, expected.loss)
    assert objective.requires == ("reward|advantages",)
    assert objective.needs_ref_logprobs == ("kl_loss_coef" in options)


def test_make_sft() -> None:
    logprobs, entropy, fields = random_case(19, 31)
    objective = make_objective(ObjectiveConfig(objective="sft", entropy_coef=0.0))
    assert torch.equal(objective(logprobs, entropy, fields).loss, sft_loss(logprobs, entropy, fields).loss)
    assert objective.requires == ()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"objective": "a2c"}, "--objective a2c"),
        ({"eps_clip": 0.0}, "--eps-clip 0.0"),
        ({"eps_clip": 1.5}, "--eps-clip 1.5"),
        ({"eps_clip": math.nan}, "--eps-clip nan"),
        ({"eps_clip_high": -0.1}, "--eps-clip-high -0.1"),
        ({"dual_clip": 1.0}, "--dual-clip 1.0"),
        ({"kl_loss_coef": -1.0}, "--kl-loss-coef -1.0"),
        ({"kl_loss_coef": math.inf}, "--kl-loss-coef inf"),
        ({"kl_loss_type": "k4"}, "--kl-loss-type k4"),
        ({"entropy_coef": math.nan}, "--entropy-coef nan"),
    ],
)
def test_senseless_settings_are_refused(settings: dict, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        make_objective(ObjectiveConfig(**settings))


def test_missing_fields_are_refused() -> None:
    logprobs, entropy, fields = random_case(20, 5)
    with pytest.raises(InputError, match="needs advantages"):
        grpo_loss(logprobs, entropy, replace(fields, advantages=None))
    with pytest.raises(InputError, match="--kl-loss-coef above 0 needs the logprobs of a reference"):
        grpo_loss(logprobs, entropy, replace(fields, ref_logprobs=None), kl_loss_coef=0.1)
    with pytest.raises(InputError, match="--kl-loss-type k9"):
        grpo_loss(logprobs, entropy, fields, kl_loss_coef=0.1, kl_loss_type="k9")
