"""Keyed random numbers: published vectors, the same bits everywhere, independent of the batch, uniform."""

import numpy as np
import pytest
import torch

from conftest import seed_all
from megatron_dta.common import keyed_random
from megatron_dta.common.keyed_random import Domain, keyed_permutation, keyed_uniform, philox4x32

# Known answers of philox4x32-10, from the test vectors of its authors' library Random123.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_philox_known_answers(counter: str, key: str, answer: str, library: str):
    make = np.array if library == "numpy" else torch.tensor
    inputs = tuple(make([word], dtype=np.int64 if library == "numpy" else torch.int64) for word in words(counter))
    outputs = philox4x32(inputs, tuple(words(key)))
    assert [int(output[0]) for output in outputs] == words(answer)


def test_numpy_and_torch_give_the_same_bits():
    rng = seed_all(7)
    sequence, position = rng.integers(0, 2**63, (1000, 1)), rng.integers(0, 2**30, (1, 17))
    for seed, iteration in ((0, 0), (2**64 - 1, 2**32 - 1), (1234, 56)):
        with_numpy = keyed_uniform(seed, Domain.SAMPLING, iteration, sequence, position)
        with_torch = keyed_uniform(
            seed, Domain.SAMPLING, iteration, torch.from_numpy(sequence), torch.from_numpy(position)
        )
        assert with_numpy.shape == (1000, 17)
        assert with_torch.dtype == torch.float64
        assert np.array_equal(with_numpy, with_torch.numpy())


@pytest.mark.parametrize("axis", ["sequence", "position", "seed"])
def test_uniform_along_every_axis_of_the_key(axis: str):
    """Consecutive keys, the worst case for a weak hash: moments, bins, neighbours and pairs look independent."""
    n = 200_000
    index = np.arange(n)
    if axis == "sequence":
        u = keyed_uniform(1, Domain.SAMPLING, 0, index, np.zeros(1, np.int64))
    elif axis == "position":
        u = keyed_uniform(1, Domain.SAMPLING, 0, np.zeros(1, np.int64), index)
    else:
        n = 4096
        zero = np.zeros(1, np.int64)
        keys = [(i, 0) if axis == "seed" else (1, i) for i in range(n)]
        u = np.array([keyed_uniform(seed, Domain.SAMPLING, iteration, zero, zero)[0] for seed, iteration in keys])
    assert u.min() >= 0
    assert u.max() < 1
    sigma = 1 / np.sqrt(12 * n)
    assert abs(u.mean() - 0.5) < 5 * sigma
    bins = np.bincount((u * 64).astype(int), minlength=64)
    chi_square = ((bins - n / 64) ** 2 / (n / 64)).sum()
    assert chi_square < 63 + 5 * np.sqrt(2 * 63)
    for lag in (1, 2, 64):
        assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / np.sqrt(n)
    pairs = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
    assert ((pairs - n / 256) ** 2 / (n / 256)).sum() < 255 + 6 * np.sqrt(2 * 255)
    if n > 100_000:  # the low bits as well
        low = np.bincount((u * 2**52).astype(np.int64) % 64, minlength=64)
        assert ((low - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
        assert np.unique(u).size == n


def test_permutation_is_one_and_is_uniform():
    counts = np.zeros((5, 5))
    for iteration in range(2000):
        order = keyed_permutation(3, iteration, 5)
        assert sorted(order) == list(range(5))
        counts[order, np.arange(5)] += 1
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 16 + 6 * np.sqrt(2 * 16)
    assert np.array_equal(keyed_permutation(3, 17, 1000), keyed_permutation(3, 17, 1000))
    assert keyed_permutation(3, 17, 0).size == 0


def test_wide_keys_never_share_a_counter(monkeypatch: pytest.MonkeyPatch):
    """Keys that differ in one bit anywhere, at positions and in domains at their ends: all counters are different."""
    counters: list[tuple[int, ...]] = []

    def record(counter: tuple, key: tuple) -> tuple:
        words = np.stack(np.broadcast_arrays(*counter))
        assert words.min() >= 0
        assert words.max() < 2**32
        counters.extend(map(tuple, words.T.tolist()))
        return philox4x32(counter, key)

    monkeypatch.setattr(keyed_random, "philox4x32", record)
    keys = np.array([0, *(1 << bit for bit in range(63)), 2**63 - 1, 2**62 + 2**61])
    for domain in Domain:
        for position in (0, 1, 2**29, 2**30 - 1):
            for iteration in (0, 2**32 - 1):
                keyed_uniform(1, domain, iteration, keys, np.array([position]))
    assert len(set(counters)) == len(counters) == len(Domain) * 4 * 2 * len(keys)


def test_keys_of_one_word_have_the_plain_counter():
    """A sequence number below 2^32 gives (position, sequence, iteration, domain), as written files have it."""
    high, low, _, _ = philox4x32(tuple(np.array([word]) for word in (7, 2**32 - 1, 3, 1)), (5, 0))
    assert keyed_uniform(5, Domain.EVALUATION, 3, np.array([2**32 - 1]), np.array([7]))[0] == (
        ((int(high[0]) << 20) | (int(low[0]) >> 12)) * 2.0**-52
    )


def test_keys_out_of_range_are_refused():
    zero = np.zeros(1, np.int64)
    for arguments in (
        (-1, Domain.SAMPLING, 0, zero, zero),
        (0, Domain.SAMPLING, 2**32, zero, zero),
        (0, Domain.SAMPLING, 0, zero - 1, zero),
        (0, Domain.SAMPLING, 0, zero, zero + 2**30),
        (0, Domain.SAMPLING, 0, torch.zeros(1), torch.zeros(1)),
    ):
        with pytest.raises(ValueError, match=r"must be"):
            keyed_uniform(*arguments)
