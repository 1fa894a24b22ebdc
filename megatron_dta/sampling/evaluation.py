"""Estimates pass@k and maj@k from several answers to each problem, from independent rollouts or from trees.

pass@k is the probability that one of k answers is right. With c right answers among n >= k, the estimate is
1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374), which is unbiased for independent answers. maj@k is the
probability that the most frequent of k answers is right, with ties broken evenly. It is estimated by keyed resampling
of k of the n answers without replacement (Wang et al., arXiv 2203.11171, take k = n).

Leaves of a tree share prefixes, so they are not independent. For trees the same formulas give the mean over k of the n
leaves, which describes that tree and does not estimate the value of k independent answers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 1000
RIGHT_ABOVE = 0.5


@dataclass(frozen=True)
class Answers:
    """The n answers to one problem.

    Attributes:
        answers: the answers that are compared in the vote.
        rewards: float [n]; an answer is right if its reward is above ``RIGHT_ABOVE``.
        decoded_tokens: tokens that were sampled for them; shared nodes count once.
    """

    answers: Sequence[Hashable]
    rewards: Sequence[float]
    decoded_tokens: int


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The probability that ``k`` of ``num_answers`` answers, drawn without replacement, contain a right one."""
    return 1 - comb(num_answers - num_right, k) / comb(num_answers, k)


def pass_rates(rewards: Sequence[Sequence[float]], samples: int) -> dict[str, float]:
    """``pass@k`` for k = 2, 4, 8 ... and ``samples``, means over the prompts with at least k rewards.

    Args:
        rewards: rewards of the answers to each prompt; fewer than ``samples`` if some have failed.
    """
    ks = sorted({2**i for i in range(1, samples.bit_length())} | {samples}) if samples > 1 else []
    result = {}
    for k in ks:
        rates = [
            pass_at_k(len(answers), sum(r > RIGHT_ABOVE for r in answers), k)
            for answers in rewards
            if len(answers) >= k
        ]
        if rates:
            result[f"pass@{k}"] = float(np.mean(rates))
    return result


def majority_at_k(answers: Sequence[Hashable], is_right: Sequence[bool], k: int, draw: np.random.Generator) -> float:
    """The probability that the most frequent of ``k`` answers is right; exact for k = 1 and k = n."""
    count = len(answers)
    if k == 1:
        return float(np.mean(is_right))
    numbers: dict[Hashable, int] = {}
    names = np.array([numbers.setdefault(answer, len(numbers)) for answer in answers])
    right = np.asarray(is_right, np.float64)
    if k == count:
        return _majority(names, right, len(numbers))
    rows = draw.permuted(np.tile(np.arange(count), (RESAMPLES, 1)), axis=1)[:, :k]
    return float(np.mean([_majority(names[row], right[row], len(numbers)) for row in rows]))


def _majority(names: np.ndarray, right: np.ndarray, num_names: int) -> float:
    """Share of the most frequent names that are right. Equal answers are judged the same way, or by their mean."""
    votes = np.bincount(names, minlength=num_names)
    judged = np.bincount(names, right, num_names)
    winners = votes == votes.max()
    return float(np.mean(judged[winners] / votes[winners]))


def evaluate_answers(problems: Sequence[Answers], ks: Sequence[int], seed: int) -> dict[str, float]:
    """``reward``, ``answers`` and ``decoded_tokens`` (means over problems), and ``pass@k`` and ``maj@k`` for each k.

    A k above the number of answers to some problem is left out.
    """
    ks = [k for k in ks if k <= min(len(problem.answers) for problem in problems)]
    result = {
        "reward": float(np.mean([np.mean(problem.rewards) for problem in problems])),
        "answers": float(np.mean([len(problem.answers) for problem in problems])),
        "decoded_tokens": float(np.mean([problem.decoded_tokens for problem in problems])),
    }
    right = [[reward > RIGHT_ABOVE for reward in problem.rewards] for problem in problems]
    for k in ks:
        result[f"pass@{k}"] = float(np.mean([pass_at_k(len(is_right), sum(is_right), k) for is_right in right]))
    for k in ks:
        votes = [
            majority_at_k(problem.answers, is_right, k, np.random.Generator(np.random.Philox(key=[seed, i])))
            for i, (problem, is_right) in enumerate(zip(problems, right, strict=True))
        ]
        result[f"maj@{k}"] = float(np.mean(votes))
    return result
