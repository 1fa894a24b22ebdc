"""Every objective on a tree against losses written out over single sequences: float64, every tree mode.

Sequences that share tokens have other advantages, old, reference and sampler's logprobs and masks there.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dta.core.config import ObjectiveConfig, ParallelConfig
from megatron_dta.core.engine import StepPart, TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.objectives.registry import make_objective
from mesh_worker import MeshCase, run_cases, run_on_ranks
from objective_cases import TEMPERATURE, Alone, largest_error, make_case, reference_gradients
from tree_engine_cases import tree_config

CUTS = [("dense", 9, None), ("packed", 30, None), ("dta", 5, None), ("dta", 7, 0)]
LOW, HIGH = 0.15, 0.3
# The mean over a sequence varies less than its tokens.
GSPO_LOW, GSPO_HIGH = 0.03, 0.05


def minimum(ratio: Tensor, advantages: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    return torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(s: Alone) -> Tensor:
    return -minimum((s.logprobs - s.old).exp(), s.advantages)


def gspo(s: Alone) -> Tensor:
    return -minimum((s.logprobs - s.old).mean().exp().expand_as(s.logprobs), s.advantages, GSPO_LOW, GSPO_HIGH)


def gspo_token(s: Alone) -> Tensor:
    of_sequence = (s.logprobs - s.old).mean().exp().detach()
    return -minimum(of_sequence * s.logprobs.exp() / s.logprobs.exp().detach(), s.advantages, GSPO_LOW, GSPO_HIGH)


def cispo(s: Alone) -> Tensor:
    return -(s.logprobs - s.old).exp().clamp(1 - LOW, 1 + HIGH).detach() * s.advantages * s.logprobs


def penalized(s: Alone) -> Tensor:
    kl = (s.ref - s.logprobs).exp() - 1 - (s.ref - s.logprobs)
    return grpo(s) + 0.3 * kl - 0.2 * s.entropy


def truncated(s: Alone) -> Tensor:
    return (s.old - s.rollout).exp().clamp(0.7, 1.4) * grpo(s)


def masked_out(s: Alone) -> Tensor:
    weight = (s.old - s.rollout).exp()
    return torch.where((weight >= 0.7) & (weight <= 1.4), weight, 0) * cispo(s)


def truncated_sequence(s: Alone) -> Tensor:
    return (s.old - s.rollout).sum().exp().clamp(0.7, 1.4) * gspo(s)


CLIP = {"eps_clip": LOW, "eps_clip_high": HIGH}
GSPO_CLIP = {"eps_clip": GSPO_LOW, "eps_clip_high": GSPO_HIGH}
TIS = {"use_tis": True, "tis_clip": 1.4, "tis_clip_low": 0.7}
OBJECTIVES = {
    "grpo": (grpo, CLIP),
    "gspo": (gspo, GSPO_CLIP),
    "gspo-token": (gspo_token, GSPO_CLIP),
    "cispo": (cispo, CLIP),
    "sft": (lambda s: -s.logprobs, {}),
    "grpo with KL and entropy": (penalized, CLIP | {"kl_loss_coef": 0.3, "entropy_coef": 0.2}),
    "grpo with TIS": (truncated, CLIP | TIS),
    "cispo with masked TIS": (masked_out, CLIP | TIS | {"tis_mode": "mask"}),
    "gspo with TIS of sequences": (truncated_sequence, GSPO_CLIP | TIS | {"tis_level": "sequence"}),
}
AGGREGATIONS = {
    "token-mean": lambda losses: torch.cat(losses).mean(),
    "sequence-mean": lambda losses: torch.stack([loss.mean() for loss in losses]).mean(),
    "sequence-sum": lambda losses: torch.stack([loss.sum() for loss in losses]).mean() / 13.0,
}


@pytest.fixture(scope="module")
def case():
    return make_case(seed=101)


def train(case, settings: dict, cut: tuple, aggregation: str = "token-mean", **more):
    model, weights, samples = case
    mode, segment_tokens, activation_tokens = cut
    tree_model = build_model(model, torch.device("cpu"))
    tree_model.load_state_dict(weights)
    batch = prepare_batch(
        samples, tree_config(mode, segment_tokens, activation_tokens), aggregation, loss_length=13.0, **more
    )
    result = TreeEngine(tree_model, TEMPERATURE, 5).forward_backward(batch, make_objective(ObjectiveConfig(**settings)))
    return result, {name: p.grad for name, p in tree_model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "aggregation"),
    [
        *((name, "token-mean") for name in OBJECTIVES),
        *(("grpo with KL and entropy", "sequence-mean"), ("gspo with TIS of sequences", "sequence-sum")),
    ],
)
def test_equals_the_loss_written_out(case, name, aggregation):
    model, weights, samples = case
    of_sequence, settings = OBJECTIVES[name]
    loss, expected = reference_gradients(
        model, weights, samples, lambda sequences: AGGREGATIONS[aggregation]([of_sequence(s) for s in sequences])
    )
    settings = {"objective": name.split()[0]} | settings
    for cut in CUTS if name == "grpo" else CUTS[3:] if " with " in name else CUTS[1::2]:
        result, gradients = train(case, settings, cut, aggregation)
        assert float(result.loss) == pytest.approx(loss, rel=1e-12)
        assert largest_error(gradients, expected) < 1e-12, cut
    if name not in ("sft", "grpo with KL and entropy"):
        # Some tokens are clipped and some are not, or the test would not tell.
        assert 0.05 < float(result.metrics["clip_fraction"]) < 0.95


@pytest.mark.parametrize(("name", "other"), [("grpo", "gspo"), ("gspo", "cispo"), ("cispo", "grpo")])
def test_a_wrong_loss_is_seen(case, name, other):
    """Control: the objectives differ by far more than the tolerance above."""
    model, weights, samples = case
    _, expected = reference_gradients(
        model, weights, samples, lambda s: torch.cat([OBJECTIVES[name][0](sequence) for sequence in s]).mean()
    )
    _, gradients = train(case, {"objective": other} | OBJECTIVES[name][1], CUTS[2])
    assert largest_error(gradients, expected) > 1e-3


# ------------------------------------------------------------------------------------------------------- preferences


# A sequence in two pairs, a pair of a sequence and its prefix, and sequences in none.
PAIRS = np.array([[0, 1], [2, 0], [3, 5], [4, 7]])


def plain_dpo(pairs: np.ndarray, beta: float):
    def loss(sequences: list[Alone]) -> Tensor:
        total = 0.0
        for chosen, rejected in pairs:
            won, lost = (sequences[i].logprobs.sum() - sequences[i].ref.sum() for i in (chosen, rejected))
            total = total - torch.nn.functional.logsigmoid(beta * (won - lost))
        return total / len(pairs)

    return loss


def test_dpo_equals_both_sequences_in_one_graph(case):
    model, weights, samples = case
    loss, expected = reference_gradients(model, weights, samples, plain_dpo(PAIRS, 0.3))
    settings = {"objective": "dpo", "dpo_beta": 0.3}
    for cut in CUTS:
        result, gradients = train(case, settings, cut, part=StepPart(preference_pairs=PAIRS))
        assert float(result.loss) == pytest.approx(loss, rel=1e-12)
        assert largest_error(gradients, expected) < 1e-12, cut
    assert 0 <= float(result.metrics["dpo_accuracy"]) <= 1


# -------------------------------------------------------------------------------------------------------------- meshes

MESHES = {
    "data": ({}, [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9, 10, 11]]),
    "pipeline": ({"pipeline_model_parallel_size": 2}, [list(range(12))]),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_give_the_same(case, mesh, tmp_path):
    """Pairs across ranks, largest values of all ranks, one denominator."""
    model, weights, samples = case
    assert len(samples) == 12
    settings = {
        "dpo": ({"objective": "dpo", "dpo_beta": 0.3}, "token-mean", PAIRS),
        "gspo": ({"objective": "gspo"} | GSPO_CLIP | TIS, "sequence-sum", None),
        "grpo": ({"objective": "grpo"} | CLIP, "sequence-mean", None),
    }
    sizes, partition = MESHES[mesh]
    cases = {
        name: MeshCase(
            model, ParallelConfig(**sizes), tree_config("dta", 6), samples, partition, weights, objective,
            TEMPERATURE, aggregation, loss_length=13.0, preference_pairs=pairs,
        )
        for name, (objective, aggregation, pairs) in settings.items()
    }  # fmt: skip
    ranks = run_on_ranks(run_cases, cases, 2, tmp_path / "mesh")
    for name, (objective, aggregation, pairs) in settings.items():
        part = StepPart(preference_pairs=pairs)
        result, gradients = train(case, objective, CUTS[0], aggregation, part=part)
        norm = sum(float((gradient**2).sum()) for gradient in gradients.values()) ** 0.5
        for rank in ranks:
            assert rank[name].loss == pytest.approx(float(result.loss), rel=1e-12)
            assert rank[name].grad_norm == pytest.approx(norm, rel=1e-6)  # Megatron computes it in float32
            for metric, expected in result.metrics.items():
                assert rank[name].metrics[metric] == pytest.approx(float(expected), rel=1e-9), (name, metric)
