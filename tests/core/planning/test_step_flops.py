"""The operations of a step are those of every product written out."""

from dataclasses import replace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.shapes.decoder import DecoderShape


def test_operations_are_those_of_every_product_written_out():
    generator = seed_all(4)
    trunk = generator.integers(0, 50, 9)
    tails = [generator.integers(0, 50, n) for n in (5, 11, 1)]
    masks = [np.arange(9 + len(tail)) >= 7 for tail in tails]
    samples = [
        TrainingSample(np.append(trunk, tail).astype(np.int32), mask) for tail, mask in zip(tails, masks, strict=True)
    ]
    counts = StepCounts.of(plan_step(samples, "dta", StepBudget(6)))
    tokens = {tuple(sample.token_ids[: i + 1].tolist()) for sample in samples for i in range(len(sample.token_ids))}
    assert counts.tokens == len(tokens)
    assert counts.pairs == sum(len(prefix) for prefix in tokens)
    rows = {tuple(sample.token_ids[:i].tolist()) for sample in samples for i in np.flatnonzero(sample.loss_mask)}
    assert counts.rows == len(rows)
    hidden, ffn, heads, groups, size, vocabulary = 8, 20, 4, 2, 3, 50
    shape, forward = DecoderShape(5, hidden, ffn, heads, groups, size, vocabulary), 0.0
    for prefix in tokens:
        products = [(hidden, heads * size), (hidden, groups * size), (hidden, groups * size), (heads * size, hidden)]
        products += [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        forward += 5 * (sum(2 * a * b for a, b in products) + 2 * 2 * heads * size * len(prefix))
    forward += counts.rows * 2 * hidden * vocabulary
    assert counts.flops(shape) == pytest.approx(3 * forward)
    routers = 5 * len(tokens) * 2 * hidden * 7
    experts = replace(shape, num_experts=7, moe_layers=(), moe_router_topk=2, moe_ffn_hidden_size=ffn // 2)
    assert counts.flops(experts) == pytest.approx(3 * (forward + routers))
