"""A toy decision process with exact expectations: leaf weights make tree estimates unbiased, equal weights do not."""

import math
from bisect import bisect_right
from functools import cache

import numpy as np
import pytest

from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.sampler import TreeQuery, TreeSampler
from megatron_dta.sampling.treepo.settings import TreeSettings
from recording_engine import RecordingEngine

EOS, CAP, QUERIES = 0, 9, 200
# Probability of the next token (column) after a token (row); token 0 ends. From 1 one mostly ends soon, from 2 and 3
# one goes on, so long paths are those through 3.
CHAIN = np.array([[1.0, 0.0, 0.0, 0.0], [0.5, 0.3, 0.1, 0.1], [0.15, 0.2, 0.3, 0.35], [0.05, 0.05, 0.3, 0.6]])


CUMULATIVE = np.cumsum(CHAIN, axis=1).tolist()


class ChainEngine(RecordingEngine):
    """Tokens of a Markov chain, and their true logprobs."""

    def token_after(self, prefix, key: int) -> int:
        return bisect_right(CUMULATIVE[prefix[-1]], self._numbers(np.asarray(prefix, dtype=np.int32), key)[0])

    def logprob_after(self, prefix, key: int) -> float:
        return math.log(CHAIN[prefix[-1], self.token_after(prefix, key)])


def reward(tokens: np.ndarray) -> float:
    """Number of 3s in a response that has ended."""
    return float((tokens == 3).sum()) if tokens[-1] == EOS else 0.0


def statistics_of(response: np.ndarray) -> np.ndarray:
    """Reward, length, and reward times the score of one parameter: the tilt of row 2 towards token 3."""
    tokens = np.concatenate([[2], response])
    after_2 = tokens[1:][tokens[:-1] == 2]
    score = (after_2 == 3).sum() - len(after_2) * CHAIN[2, 3]
    return np.array([reward(response), len(response), reward(response) * score])


@cache
def exact_expectation() -> np.ndarray:
    """All responses to the prompt 2, with their probabilities."""
    total, mass = np.zeros(3), 0.0
    waiting = [((), 1.0)]
    while waiting:
        response, probability = waiting.pop()
        if len(response) == CAP or (response and response[-1] == EOS):
            total += probability * statistics_of(np.array(response))
            mass += probability
            continue
        last = response[-1] if response else 2
        waiting += [((*response, token), probability * p) for token, p in enumerate(CHAIN[last]) if p]
    assert abs(mass - 1) < 1e-12
    return total


VARIANTS = {
    "plain": {},
    "N = 3": {"branching_factor": 3},
    "to low logprob": {"allocation": "low-logprob", "temperature": 0.3},
    "no fallback": {"fallback": "none"},
    "fallback on finished paths": {"fallback": "finished"},
}


def deviations(trees, weights_of) -> np.ndarray:
    """How many standard errors the mean over queries is off, for each of the three statistics."""
    estimates = []
    for tree in trees:
        weights = weights_of(tree)
        values = {leaf: statistics_of(tree.tokens(leaf)[1:]) for leaf in tree.leaves}
        estimates.append(sum(weights[leaf] * values[leaf] for leaf in tree.leaves))
    estimates = np.array(estimates)
    return (estimates.mean(0) - exact_expectation()) / (estimates.std(0, ddof=1) / np.sqrt(len(estimates)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_weighted_estimates_are_unbiased_and_plain_means_are_not(variant: str):
    settings = TreeSettings(8, CAP, segment_tokens=2, **VARIANTS[variant])
    trees = []
    for part in range(QUERIES // 50):
        engine = ChainEngine(4, seed=part, most_at_once=50)
        queries = [TreeQuery(50 * part + i, np.array([2])) for i in range(50)]
        trees += TreeSampler(engine, settings).sample(queries, SamplingParams(CAP, EOS, seed=11), 0)
    weighted = deviations(trees, lambda tree: tree.leaf_weights())
    assert (np.abs(weighted) < 3).all(), weighted
    plain = deviations(trees, lambda tree: dict.fromkeys(tree.leaves, 1 / len(tree.leaves)))
    assert plain[1] > 6, f"leaves should be too long on the average: {plain}"
    if variant != "no fallback":
        assert any(tree.nodes[leaf].fallback for tree in trees for leaf in tree.leaves)
