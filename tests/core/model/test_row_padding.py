"""Padding rows for FP8 products changes neither the loss nor any gradient."""

import pytest

from conftest import seed_all
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.extras.parity import compare_outcomes, random_training_samples, run_stock, run_tree
from tree_engine_cases import GRPO, QWEN3, TEMPERATURE, branching_sequences, model_config, tree_config, weights_of


@pytest.mark.parametrize(("unit", "activation_tokens"), [(1, 0), (5, None), (32, 0)])
def test_equals_stock_megatron(monkeypatch: pytest.MonkeyPatch, unit: int, activation_tokens: int | None) -> None:
    samples = random_training_samples(branching_sequences(seed_all(23), count=6, longest=12), seed=23)
    model = model_config(**QWEN3)
    weights = weights_of(model, seed=5)
    expected = run_stock(model, weights, samples, GRPO, TEMPERATURE)
    rows = []
    rows_of_share = TreeGPTModel.rows_of_share
    monkeypatch.setattr(TreeGPTModel, "_row_unit", property(lambda self: unit))

    def noted(self: TreeGPTModel, num_tokens: int, context_size: int = 1) -> int:
        rows.append(rows_of_share(self, num_tokens, context_size))
        return rows[-1]

    monkeypatch.setattr(TreeGPTModel, "rows_of_share", noted)
    outcome, _ = run_tree(model, weights, samples, GRPO, tree_config("dta", 7, activation_tokens), TEMPERATURE)
    assert {count % unit for count in rows} == {0}
    assert unit == 1 or min(rows) >= unit
    errors = compare_outcomes(outcome, expected)
    assert errors.largest() < 1e-12, errors
