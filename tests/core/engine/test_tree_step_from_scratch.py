"""``examples/tree_step_from_scratch.py`` equals separate sequences, as its ``main`` asserts, and the tree engine."""

import numpy as np
import pytest
import torch

import tree_step_from_scratch as tree_step
from megatron_dta.core.config import ObjectiveConfig
from megatron_dta.core.objectives.registry import make_objective
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.extras.parity import run_tree
from megatron_dta.extras.parity.huggingface import to_huggingface
from tree_engine_cases import model_config, tree_config, weights_of


def test_it_equals_separate_sequences(capsys: pytest.CaptureFixture) -> None:
    tree_step.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7
    assert lines[3].startswith("trees, tied head, activations kept")


@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_gives_the_same(tied: bool) -> None:
    torch.manual_seed(2)
    rollouts = tree_step.random_rollouts()
    model = model_config(
        num_layers=tree_step.LAYERS,
        hidden_size=tree_step.CHANNELS,
        ffn_hidden_size=tree_step.FEED_FORWARD,
        num_attention_heads=tree_step.HEADS,
        num_query_groups=tree_step.GROUPS,
        kv_channels=tree_step.HEAD_SIZE,
        vocab_size=tree_step.VOCABULARY,
        make_vocab_size_divisible_by=1,
        max_position_embeddings=100,
        norm_epsilon=1e-6,
        init_method_std=0.2,
        untie_embeddings_and_output_weights=not tied,
    )
    engine_weights = weights_of(model, seed=3)
    weights = {name: x.clone().requires_grad_() for name, x in to_huggingface(engine_weights, model).items()}
    assert weights.keys() == tree_step.random_weights(tied).keys()
    step = tree_step.TreeStep(weights, rollouts, keep_activations=False)

    def values(numbers: torch.Tensor) -> np.ndarray:
        return np.append(0, numbers.numpy())

    samples = [
        TrainingSample(
            np.array(rollout.tokens, np.int32),
            values(rollout.loss_weights) > 0,
            advantages=values(rollout.advantages),
            old_logprobs=values(rollout.old_logprobs),
        )
        for rollout in rollouts
    ]
    objective = make_objective(ObjectiveConfig(objective="grpo"))
    outcome, _ = run_tree(model, engine_weights, samples, objective, tree_config("dta", 16))
    assert outcome.loss == pytest.approx(step.loss, rel=1e-12)
    for i, (computed, sample) in enumerate(zip(outcome.logprobs, samples, strict=True)):
        np.testing.assert_allclose(computed, values(step.logprobs[i]) * sample.loss_mask, rtol=1e-12)
    gradients = to_huggingface(outcome.gradients, model)
    assert tree_step.largest_error(gradients, tree_step.take_gradients(weights)) < 1e-12
