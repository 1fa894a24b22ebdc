"""Relative errors between outcomes: of normal values, of values that are zero up to rounding, of NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_dta.extras.parity import compare_outcomes
from megatron_dta.extras.parity.outcome import Outcome


def outcome(loss: float = 2.0, **gradients: list[float]) -> Outcome:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in gradients.items()}
    return Outcome(loss, [np.array([-1.0, -4.0]), np.array([-2.0])], tensors)


def test_each_parameter_has_its_own_scale() -> None:
    exact = outcome(large=[100.0, 1.0], small=[1e-9, 2e-9])
    errors = compare_outcomes(outcome(large=[100.0, 1.5], small=[1e-9, 3e-9]), exact)
    assert (errors.gradient, errors.worst_parameter) == (pytest.approx(0.5), "small")
    errors = compare_outcomes(outcome(loss=2.5, large=[100.0, 1.0], small=[1e-9, 2e-9]), exact)
    assert (errors.loss, errors.logprob, errors.gradient) == (pytest.approx(0.25), 0.0, 0.0)


@pytest.mark.parametrize("rounding", [0.0, 3e-16])
def test_what_is_zero_but_for_rounding_is_compared_with_the_largest(rounding: float) -> None:
    exact = outcome(large=[1.0], zero=[rounding, -rounding])
    assert compare_outcomes(outcome(large=[1.0], zero=[2e-16, 0.0]), exact).gradient < 1e-15
    errors = compare_outcomes(outcome(large=[1.0], zero=[1e-6, 0.0]), exact)
    assert (errors.gradient, errors.worst_parameter) == (pytest.approx(1e-6), "zero")


def test_what_is_broken_does_not_pass() -> None:
    exact = outcome(large=[1.0], small=[0.1])
    assert compare_outcomes(outcome(large=[1.0]), exact).gradient == 1.0
    assert math.isnan(compare_outcomes(outcome(large=[math.nan], small=[0.1]), exact).gradient)
    assert math.isnan(compare_outcomes(outcome(loss=math.nan, large=[1.0], small=[0.1]), exact).loss)
    nothing = outcome(loss=0.0, large=[0.0])
    assert compare_outcomes(nothing, nothing).largest() == 0.0
    assert compare_outcomes(outcome(loss=0.0, large=[1e-9]), nothing).gradient == math.inf
