"""A loss function of whole sequences (``SequenceLoss``) gives the gradients of the same loss written per token."""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dta.core.engine import TreeEngine, prepare_batch
from megatron_dta.core.model.build import build_model
from megatron_dta.core.objectives.fields import LossFields, Objective, SequenceLoss, TokenLosses
from objective_cases import TEMPERATURE, make_case
from tree_engine_cases import tree_config


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "segment", "with_entropy"), [("dta", 5, True), ("packed", 30, False), ("dense", 9, True)]
)
def test_sequence_loss_equals_token_losses(mode: str, segment: int, with_entropy: bool):
    config, weights, samples = make_case(11)
    batch = prepare_batch(samples, tree_config(mode, segment), "sequence-sum", loss_length=1.0)
    # The weight of each sequence is 1 over their number.
    count = len(samples)

    def per_token(logprobs: Tensor, entropy: Tensor, fields: LossFields) -> TokenLosses:
        mask = fields.loss_mask
        loss = torch.where(mask, logprobs, 0.0) ** 2 * torch.where(mask, fields.advantages, 0.0)
        return TokenLosses(loss - 0.3 * torch.where(mask, entropy, 0.0) if with_entropy else loss)

    seen = []

    def per_group(logprobs: Tensor, entropy: Tensor, sequences: np.ndarray) -> Tensor:
        total = logprobs.new_zeros(())
        seen.extend(sequences.tolist())
        for row, number in enumerate(sequences):
            sample = samples[number]
            advantages = torch.from_numpy(sample.advantages[sample.loss_mask])
            total = total + (logprobs[row, : sample.num_trained] ** 2 * advantages).sum()
            if with_entropy:
                total = total - 0.3 * entropy[row, : sample.num_trained].sum()
        return total / count

    results = []
    for objective in (Objective("tokens", per_token), SequenceLoss(per_group)):
        model = build_model(config, torch.device("cpu"))
        model.load_state_dict(weights)
        engine = TreeEngine(model, TEMPERATURE)
        result = engine.forward_backward(batch, objective, return_outputs=True)
        results.append((result, _gradients(model), engine.compute_outputs(batch)))
    assert sorted(seen) == list(range(count))
    (tokens, expected, outputs), (groups, actual, _) = results
    assert float(groups.loss) == pytest.approx(float(tokens.loss), rel=1e-12)
    for name, gradient in expected.items():
        assert torch.allclose(actual[name], gradient, rtol=1e-12, atol=1e-12), name
    # The outputs of the training pass are those of a pass without gradients, 0 where nothing is trained.
    for sample, actual, other, entropy in zip(
        samples, groups.outputs.logprobs, outputs.logprobs, groups.outputs.entropy, strict=True
    ):
        assert np.allclose(actual, other, rtol=0, atol=1e-13)
        assert not actual[~sample.loss_mask].any()
        assert (entropy[sample.loss_mask] > 0).all()


@pytest.mark.parametrize(("segment", "seed"), [(2, 0), (5, 1), (60, 2)])
def test_entropies_and_sequences_that_some_groups_leave_out(segment: int, seed: int):
    """A factor of 0 and a term that is not computed give the same loss and gradients, in whichever group it is."""
    config, weights, samples = make_case(13)
    batch = prepare_batch(samples, tree_config("dta", segment))
    rng = np.random.default_rng(seed)
    entropy_factors, logprob_factors = rng.integers(0, 2, (2, len(samples)))

    def run(leaves_out: bool) -> tuple[float, dict[str, Tensor]]:
        def loss(logprobs: Tensor, entropy: Tensor, sequences: np.ndarray) -> Tensor:
            total = logprobs.new_zeros(())
            for row, number in enumerate(sequences):
                for factors, values in ((entropy_factors, entropy), (logprob_factors, logprobs)):
                    if factors[number] or not leaves_out:
                        total = total - int(factors[number]) * values[row, : samples[number].num_trained].sum()
            return total

        model = build_model(config, torch.device("cpu"))
        model.load_state_dict(weights)
        result = TreeEngine(model, TEMPERATURE).forward_backward(batch, SequenceLoss(loss))
        return float(result.loss), _gradients(model)

    (expected_loss, expected), (found_loss, actual) = run(False), run(True)
    assert found_loss == expected_loss
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name
