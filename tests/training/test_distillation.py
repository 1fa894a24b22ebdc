"""Distillation on trees in float64 against one sequence at a time, with whole logits of student and teachers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.core.config import ModelConfig, ObjectiveConfig, ParallelConfig, TreeConfig
from megatron_dta.core.config.checks.experts import check_experts
from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model, build_stock_model
from megatron_dta.core.model.parallel.mesh import initialize_parallel
from megatron_dta.core.objectives.fields import LossFields
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.objectives.weights import loss_weights
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.training.config import DistillationConfig, TrainConfig
from megatron_dta.training.huggingface.config.config_output import config_from_settings
from megatron_dta.training.teachers import Teacher, Teachers, teacher_shape
from tree_engine_cases import TEMPERATURE, branching_sequences, model_config, weights_of

OBJECTIVE = make_objective(ObjectiveConfig(objective="grpo", entropy_coef=0.02))
TEACHERS = (
    dict(num_layers=3, hidden_size=32, ffn_hidden_size=48, init_method_std=0.3),
    dict(num_layers=1, hidden_size=16, num_attention_heads=2, num_query_groups=1, init_method_std=0.4),
)
COEFFICIENT = 0.37


def make_samples(generator: np.random.Generator) -> list[TrainingSample]:
    """Branching sequences with gaps in their masks, weights and two teachers."""
    samples = []
    for tokens in branching_sequences(generator):
        mask = generator.random(len(tokens)) < 0.7
        mask[0], mask[-1] = False, True
        samples.append(
            TrainingSample(
                tokens,
                mask,
                advantages=generator.normal(size=len(tokens)),
                old_logprobs=-generator.random(len(tokens)) * 3,
                weight=float(generator.random() + 0.5),
                teacher=int(generator.integers(2)),
            )
        )
    return samples


def one_by_one(
    model: ModelConfig, weights: dict, teachers: list[tuple[ModelConfig, dict]], samples: list[TrainingSample]
) -> tuple[float, float, dict[str, torch.Tensor]]:
    """(loss, mean divergence, gradients) with Megatron's stock models and plain log-softmaxes."""
    student = build_stock_model(model, torch.device("cpu"))
    student.load_state_dict(weights)
    frozen = []
    for shape, state in teachers:
        frozen.append(build_stock_model(shape, torch.device("cpu")))
        frozen[-1].load_state_dict(state)
    counted = np.array([sample.num_trained for sample in samples])
    factors = loss_weights(counted, "sequence-mean", sequence_weights=np.array([s.weight for s in samples]))
    total = divergence = 0.0
    for sample, factor in zip(samples, factors, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))[None]
        hidden_from = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        positions = torch.arange(ids.shape[1])[None]
        trained = torch.from_numpy(np.flatnonzero(sample.loss_mask))
        log_p, log_q = (
            torch.log_softmax(module(ids, positions, hidden_from)[0] / TEMPERATURE, -1)[trained - 1]
            for module in (student, frozen[sample.teacher])
        )
        kl = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        fields = LossFields(
            torch.ones(len(trained), dtype=torch.bool),
            **{n: torch.from_numpy(getattr(sample, n)[sample.loss_mask]) for n in ("advantages", "old_logprobs")},
        )
        logprobs = log_p.gather(1, ids[0, trained, None]).squeeze(1)
        losses = OBJECTIVE(logprobs, -(log_p.exp() * log_p).sum(-1), fields)
        loss = (losses.loss.sum() + COEFFICIENT * kl.sum()) * float(factor)
        loss.backward()
        total += float(loss.detach())
        divergence += float(kl.sum().detach())
    return total, divergence / counted.sum(), {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_trees_equal_one_sequence_at_a_time(tied: bool):
    """Loss, mean divergence and every gradient, for several segment sizes and for whole and dense trees."""
    generator = seed_all(77)
    settings = {"untie_embeddings_and_output_weights": not tied}
    model = model_config(**settings)
    weights = weights_of(model, 5)
    shapes = [model_config(**sizes) for sizes in TEACHERS]
    taught = [(shape, weights_of(shape, 6 + i)) for i, shape in enumerate(shapes)]
    samples = make_samples(generator)
    loss, divergence, gradients = one_by_one(model, weights, taught, samples)
    for tree in (
        TreeConfig(tree_segment_tokens=16, logprob_chunk_tokens=5),
        TreeConfig(tree_segment_tokens=1024),
        TreeConfig(tree_mode="dense", tree_segment_tokens=64),
    ):
        settings = DistillationConfig(teacher_load_hf=["a", "b"], teacher_coef=COEFFICIENT)
        engines = {}
        for name, (shape, state) in zip("ab", taught, strict=True):
            own_model = build_model(shape, initialize_parallel(1))
            own_model.load_state_dict(state)
            engines[name] = Teacher(TreeEngine(own_model.requires_grad_(False), TEMPERATURE), tree)
        teachers = Teachers(settings, engines)
        tree_model = build_model(model, initialize_parallel(1))
        tree_model.load_state_dict(weights)
        engine = TreeEngine(tree_model, TEMPERATURE, tree.logprob_chunk_tokens)
        batch = teachers.attach(prepare_batch(samples, tree, "sequence-mean"), samples)
        assert [len(target.rows) > 5 for target in batch.teachers.args[0]] == [True, True]
        result = engine.forward_backward(batch, OBJECTIVE)
        assert float(result.loss) == pytest.approx(loss, abs=1e-12)
        assert float(result.metrics["teacher_kl"]) == pytest.approx(divergence, abs=1e-12)
        for name, parameter in tree_model.named_parameters():
            grad = parameter.grad if parameter.grad is not None else parameter.main_grad
            assert torch.allclose(grad, gradients[name], rtol=0, atol=1e-12), name


def test_a_teacher_without_experts_has_no_setting_of_experts(tmp_path: Path):
    """Otherwise neither its model nor its shape could be made."""
    experts = dict(num_experts=4)
    policy = model_config(**experts, untie_embeddings_and_output_weights=True)
    dense = replace(policy, num_experts=None, moe_ffn_hidden_size=None)
    (tmp_path / "config.json").write_text(json.dumps(config_from_settings(dense)))
    shape = teacher_shape(TrainConfig(model=policy), str(tmp_path))
    assert DecoderShape.of(shape).num_experts is None
    check_experts(shape, ParallelConfig())


def test_sampled_tokens_are_scored_by_their_teachers():
    """Logprobs under the teacher of each sample, equal to those of a dense pass of that teacher alone."""
    generator = seed_all(78)
    samples = make_samples(generator)
    shapes = [model_config(**values) for values in TEACHERS]
    engines = [
        TreeEngine(build_model(shape, initialize_parallel(8 + i)), TEMPERATURE) for i, shape in enumerate(shapes)
    ]
    settings = DistillationConfig(teacher_load_hf=["a", "b"], teacher_kl="sampled-tokens")
    tree = TreeConfig(tree_segment_tokens=32)
    by_name = {name: Teacher(engine, tree) for name, engine in zip("ab", engines, strict=True)}
    teachers = Teachers(settings, by_name)
    by_name = teachers.logprobs(samples)
    for sample, values in zip(samples, by_name, strict=True):
        alone = prepare_batch([sample], TreeConfig(tree_mode="dense", tree_segment_tokens=64))
        assert np.allclose(values, engines[sample.teacher].compute_logprobs(alone)[0], rtol=0, atol=1e-12)
    other = engines[1].compute_logprobs(
        prepare_batch(samples[:1], TreeConfig(tree_mode="dense", tree_segment_tokens=64))
    )
    assert samples[0].teacher == 1 or not np.allclose(by_name[0], other[0], atol=1e-3)
