"""The gates for tokens and for passes, and the estimates that they use."""

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.speculation.calibration import EDGES, LEAN, AcceptanceTable
from megatron_dta.sampling.speculation.forward_cost import ForwardCost
from megatron_dta.sampling.speculation.gate import SpeculationGate, gate_thresholds, token_gate
from megatron_dta.sampling.speculation.suffix_forest import Drafts
from rollout_parts.fitted_cost import fitted_cost

PLAIN = ForwardCost(base=2e-3, per_token=1e-5)
DRAFTED = ForwardCost(base=4e-3, per_token=1e-5)


@pytest.mark.parametrize(("seed", "knee"), [(0, 0.0), (1, 37.0)])
def test_gate_by_loops(seed: int, knee: float) -> None:
    rng = seed_all(seed)
    n, width = 23, 6
    cost = ForwardCost(8e-3, 3e-4, knee)
    accept = np.minimum.accumulate(rng.choice([1.0, 0.9, 0.5, 0.3, 0.05], (n, width)), axis=1)
    allowed, live = rng.integers(0, width + 1, n), n + 4
    sharers = rng.uniform(1, 60, n)
    num_free = max(0, int(knee) - live)
    lengths = token_gate(accept, allowed, gate_thresholds(cost, sharers), num_free)
    free = sorted((-accept[i, j], i, j) for i in range(n) for j in range(allowed[i]))[:num_free]
    for i in range(n):
        threshold = cost.per_token / (cost.per_token + cost.base / sharers[i])
        paid = 0
        while paid < allowed[i] and accept[i, paid] >= threshold:
            paid += 1
        assert lengths[i] == max(paid, sum(row == i for _, row, _ in free))
    for live, theta in ((16, 0.06), (64, 0.19), (256, 0.49), (512, 0.66)):
        row = np.linspace(0.99, 0.01, 99)[None]
        linear = ForwardCost(8e-3, 3e-5)
        last = token_gate(row, np.array([99]), gate_thresholds(linear, np.array([live])), 0)[0] - 1
        assert row[0, last] == pytest.approx(theta, abs=0.02)


def test_fit_of_a_forwards_cost() -> None:
    rng = seed_all(3)
    counts = np.repeat([1, 8, 32, 64, 128, 200, 256, 384, 512, 1024], 5)
    for truth in (ForwardCost(7e-3, 2e-5, 0.0), ForwardCost(6e-3, 3e-5, 200.0), ForwardCost(5e-3, 0.0, 0.0)):
        seconds = truth.seconds(counts) * rng.normal(1, 0.01, len(counts))
        fitted = fitted_cost(counts, seconds)
        assert np.allclose(fitted.seconds(counts), truth.seconds(counts), rtol=0.02)
    for tokens, seconds in (([1, 2], [1, 1]), ([1, 2, 3], [1, 0, 1]), ([1, 2, 3], [1, np.nan, 1])):
        with pytest.raises(InputError):
            fitted_cost(np.array(tokens), np.array(seconds))


def test_calibration_learns_the_truth() -> None:
    """Tokens whose tree says 1.0 but that are right 70 times of 100, each given the one before."""
    rng = seed_all(2)
    table, drafts = AcceptanceTable(), drafts_of(np.full(500, 5), np.ones(500), np.ones((500, 8)))
    for _ in range(20):
        accepted = (rng.random((500, 8)) < 0.7).cumprod(axis=1).sum(axis=1)
        table.update(drafts, np.full(500, 8), accepted)
    learned = table.probabilities(drafts, 8)[0]
    assert np.allclose(learned[:2], 0.7 ** np.arange(1, 3), atol=0.03)
    assert (np.diff(learned) <= 0).all()
    # Longer drafts are judged by all their positions, so none is believed more than what came in front of it.
    other = table.probabilities(drafts_of(np.array([20]), np.array([9]), np.ones((1, 8))), 8)[0]
    assert not np.allclose(other, learned)
    restored = AcceptanceTable()
    restored.load_state_dict(table.state_dict())
    assert np.array_equal(restored.probabilities(drafts, 8), table.probabilities(drafts, 8))


def drafts_of(matches: np.ndarray, supports: np.ndarray, probabilities: np.ndarray) -> Drafts:
    drafts = Drafts.unwritten(*probabilities.shape)
    drafts.matches[:], drafts.supports[:], drafts.probabilities[:] = matches, supports, probabilities
    return drafts


def test_estimates_by_numpy() -> None:
    rng, table = seed_all(4), AcceptanceTable()
    drafted, accepted = np.zeros((2, *(len(part) + 1 for part in EDGES)))
    for _ in range(3):
        levels = np.minimum.accumulate(rng.choice([1.0, 0.999999, 0.95, 0.6, 0.5, 0.1], (40, 24)), axis=1)
        drafts = drafts_of(rng.integers(1, 16, 40), rng.integers(1, 6, 40), levels)
        values = np.broadcast_arrays(drafts.matches[:, None], drafts.supports[:, None], levels, np.arange(24))
        cells = tuple(np.searchsorted(part, value, "right") for part, value in zip(EDGES, values, strict=True))
        lengths = rng.integers(0, 25, 40)
        right = rng.integers(0, lengths + 1)
        table.update(drafts, lengths, right)
        np.add.at(drafted, cells, np.arange(24) < lengths[:, None])
        np.add.at(accepted, cells, np.arange(24) < right[:, None])
    assert np.array_equal([*table.state_dict().values()][:2], [drafted, accepted])
    coarse = (accepted.sum(-1) + LEAN * table._prior) / (drafted.sum(-1) + LEAN)
    expected = ((accepted + LEAN * coarse[..., None]) / (drafted + LEAN))[cells]
    assert np.allclose(table.probabilities(drafts, 20), np.minimum.accumulate(expected, axis=1)[:, :20], rtol=1e-14)


def test_what_the_last_sample_saves_goes_down_once_it_drafts():
    """To what a token takes with drafts."""
    gate = SpeculationGate(PLAIN, DRAFTED)
    tokens, alone = np.array([3.0]), np.array([1.0])
    before = gate.gain(tokens, alone, 40)
    assert before == pytest.approx(3 * (2e-3 + 1e-5))
    assert gate.pays(before, 40, 43)
    assert not gate.pays(1e-3, 40, 43)
    for _ in range(50):
        gate.record_progress(8.0)
    price = float(DRAFTED.seconds(8)) / 8
    assert price < 0.8 * 2e-3
    assert gate.gain(tokens, alone, 40) == pytest.approx(3 * (price + 1e-5), rel=1e-3)
    gate_of_passes = SpeculationGate(PLAIN, DRAFTED, prices_whole=True)
    gate_of_passes.record_progress(8.0)
    assert gate_of_passes.gain(tokens, alone, 40) == pytest.approx(before)
    # The token gate uses the same cost.
    assert gate.cost(40).base == pytest.approx(price, rel=1e-3)
    for _ in range(50):
        gate.record_progress(1.0)
    assert gate.gain(tokens, alone, 40) == pytest.approx(before, rel=1e-3)
