"""verl's ``TrainingWorker`` with our engine against rows trained one by one: every gradient, metric and output."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl.utils.metric import Metric

from batches import random_rows
from reference import run_reference
from worker import mini_batches, run_case, run_ranks

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
ENTROPY_AND_KL = {"entropy_coeff": 0.01, "use_kl_loss": True}

# name -> ranks, data-parallel size, case
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one-rank": (1, 1, {"form": "padded", "loss": ENTROPY_AND_KL, "epochs": 2, "mini_batch_size": 6}),
    "float32": (1, 1, {"dtype": "float32", "loss": ENTROPY_AND_KL}),
    "data-parallel": (2, 2, {"loss": {**ENTROPY_AND_KL, "loss_agg_mode": "seq-mean-token-mean"}}),
    "tensor-parallel": (2, 1, {"engine": {"tensor_model_parallel_size": 2}, "loss": {"loss_mode": "gspo"}}),
    "context-parallel": (2, 1, {"engine": {"context_parallel_size": 2}, "loss": ENTROPY_AND_KL}),
    "context-comparing": (2, 1, {"engine": {"context_parallel_size": 2}, "loss": {"loss_mode": "kl_cov"}}),
    "pipeline": (2, 1, {"engine": {"pipeline_model_parallel_size": 2}, "loss": {"entropy_coeff": 0.1}}),
    "comparing-rows": (2, 2, {"loss": {"loss_mode": "kl_cov", **ENTROPY_AND_KL}}),
    "width": (1, 1, {"loss": {"loss_agg_mode": "seq-mean-token-sum-norm"}}),
    "distillation": (1, 1, {"distillation": {"loss_mode": "k3", "use_policy_gradient": False}}),
    "critic": (2, 2, {"value_head": True, "form": "padded"}),
}


@pytest.fixture(scope="module")
def results(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case found: those of one rank in this process, the others in the same two processes."""
    on_two = [name for name, (num_ranks, *_) in CASES.items() if num_ranks == 2]
    outcomes = run_ranks([_case(name, model_folder) for name in on_two], 2, tmp_path_factory.mktemp("ranks"))
    return dict(zip(on_two, outcomes, strict=True))


def _case(name: str, model_folder: Path) -> dict[str, Any]:
    case = {"model": str(model_folder), "dtype": "float64", "form": "nested", "seed": 7, "rows": 12}
    case |= {"mini_batch_size": 12, "engine": {}} | CASES[name][2]
    return case | {"engine": {"tree_segment_tokens": 7, **case["engine"]}}


@pytest.mark.parametrize("name", CASES)
def test_training_worker_equals_rows_one_by_one(name: str, model_folder: Path, results: dict[str, Any]):
    data_size, case = CASES[name][1], _case(name, model_folder)
    outcome = results[name] if name in results else run_case(case)
    expected = run_reference(case, data_size)
    tolerance = TOLERANCE[case["dtype"]]
    assert len(outcome["gradients"]) == len(expected)
    for gradients, reference in zip(outcome["gradients"], expected, strict=True):
        _compare(gradients, reference["gradients"], tolerance)
    _compare_outputs(case, data_size, outcome, expected, tolerance)
    _compare_metrics(outcome["ranks"], expected, tolerance)


def _compare(gradients: dict[str, Any], reference: dict[str, Any], tolerance: float) -> None:
    assert set(gradients) == set(reference)
    for name, values in reference.items():
        largest = float(values.abs().max())
        assert largest > 0, name
        difference = float((gradients[name] - values).abs().max())
        assert difference <= tolerance * max(1, largest), f"{name}: {difference} of {largest}"


def _compare_outputs(case: dict[str, Any], data_size: int, outcome: Any, expected: Any, tolerance: float) -> None:
    """Outputs of the pass without gradients, which are those of the first epoch; 0 where nothing is trained."""
    rows = random_rows(case["seed"], case["rows"])
    first = mini_batches(case, data_size)[: case["rows"] // case["mini_batch_size"]]
    for rank in range(data_size):
        numbers = [number for of_ranks in first for number in of_ranks[rank]]
        for name in expected[0]["ranks"][rank]["outputs"]:
            parts = [values for step in expected[: len(first)] for values in step["ranks"][rank]["outputs"][name]]
            for number, *pair in zip(numbers, outcome["ranks"][rank][1][name], parts, strict=True):
                computed, reference = (values.numpy() for values in pair)
                mask = rows[number]["response_mask"]
                trained = len(rows[number]["prompts"]) - 1 + np.flatnonzero(mask)
                assert np.abs(computed[trained] - reference[trained]).max(initial=0) <= 30 * tolerance
                others = np.setdiff1d(np.arange(len(computed)), trained)
                assert not computed[others].any()


def _compare_metrics(ranks: Any, expected: Any, tolerance: float) -> None:
    names = expected[0]["ranks"][0]["metrics"]
    for step, reference in enumerate(expected):
        assert ranks[0][2]["loss"][step] == pytest.approx(
            np.mean([rank["loss"] for rank in reference["ranks"]]), rel=1e-5, abs=1e-5
        )
        for name in names:
            values = [rank["metrics"][name] for rank in reference["ranks"]]
            value = Metric.aggregate_dp(values) if isinstance(values[0], Metric) else np.mean(values)
            reported = np.ravel(ranks[0][2][name])
            reported = (
                reported[step] if len(reported) == len(expected) else reported.reshape(len(expected), -1)[step].mean()
            )
            assert reported == pytest.approx(float(value), rel=10 * tolerance, abs=10 * tolerance), name
    reuse = np.ravel(ranks[0][2]["tree/token_reuse"])
    assert (reuse > 1).all()
