"""Computes random numbers as a function of a key: (seed, domain, iteration, sequence, position) -> uniform in [0, 1).

The numbers of a stateful generator would depend on the order of the calls, and so on the other sequences of a batch.
With keyed numbers the same token is drawn alone, in a batch, after a restart, on another device and when a draft is
verified.

The function is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011). For
each seed it is a bijection of the 128-bit counter, so different keys never share a block. It needs only int64
arithmetic with wrap-around, so the same code gives the same bits on NumPy arrays and on torch tensors of any device.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import numpy as np

Array = TypeVar("Array")  # np.ndarray or torch.Tensor

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
# The key of a sequence has 63 bits. Its low word is a counter word of its own; the other bits are stored above those of
# the domain (at most 8 domains) and of the position (at most a billion).
_POSITION_BITS = 30
_DOMAIN_BITS = 3
_KEY_BITS_BY_DOMAIN = 32 - _DOMAIN_BITS
# With 52 bits instead of 53, u * total < total for every positive double `total`, as inverse-CDF sampling requires.
_UNIFORM_BITS = 52


class Domain(IntEnum):
    """The purpose of the numbers. Domains never share numbers, so an evaluation does not reuse the training noise."""

    SAMPLING = 0
    EVALUATION = 1
    SHUFFLE = 2
    SPLIT = 3


def philox4x32(counter: tuple[Array, Array, Array, Array], key: tuple[int, int]) -> tuple[Array, Array, Array, Array]:
    """Ten Philox rounds; counter words (broadcastable) and results are int64 arrays with values in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The products may exceed 2^63 and wrap around; their bits are those of the unsigned products.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _WORD) ^ c1 ^ k0,
            product_1 & _WORD,
            ((product_0 >> 32) & _WORD) ^ c3 ^ k1,
            product_0 & _WORD,
        )
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def keyed_uniform(seed: int, domain: Domain, iteration: int, sequence: Array, position: Array) -> Array:
    """Float64 uniforms in [0, 1), multiples of 2^-52, of the broadcast shape of ``sequence`` and ``position``.

    ``sequence`` and ``position`` are int64 arrays of one library (numpy or torch, any device), values in [0, 2^63) and
    [0, 2^30); ``seed`` is in [0, 2^64) and ``iteration`` in [0, 2^32). Other values raise ``ValueError``. Tensors
    on an accelerator are not checked, since that would wait for the device.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be in [0, 2^64), got {seed}")
    if not 0 <= iteration <= _WORD:
        raise ValueError(f"iteration must be in [0, 2^32), got {iteration}")
    _check_range("sequence", sequence, 63)
    _check_range("position", position, _POSITION_BITS)
    zero = position * 0 + sequence * 0
    above = sequence >> 32
    beside_domain = (above & ((1 << _KEY_BITS_BY_DOMAIN) - 1)) << _DOMAIN_BITS
    beside_position = (above >> _KEY_BITS_BY_DOMAIN) << _POSITION_BITS
    counter = (
        position + beside_position + zero,
        (sequence & _WORD) + zero,
        zero + iteration,
        zero + beside_domain + int(domain),
    )
    # NumPy warns of the intended wrap-around for arrays without dimensions.
    with np.errstate(over="ignore"):
        high, low, _, _ = philox4x32(counter, (seed & _WORD, seed >> 32))
    bits = (high << (_UNIFORM_BITS - 32)) | (low >> (64 - _UNIFORM_BITS))
    # A process that draws from arrays of NumPy alone does not import torch.
    return (bits.double() if hasattr(bits, "double") else bits) * 2.0**-_UNIFORM_BITS


def keyed_permutation(seed: int, iteration: int, size: int, domain: Domain = Domain.SHUFFLE) -> np.ndarray:
    """A uniformly random order of ``range(size)``, int64 [size]: the items sorted by their keyed numbers."""
    items = np.arange(size, dtype=np.int64)
    return np.argsort(keyed_uniform(seed, domain, iteration, items, np.zeros(1, np.int64)), kind="stable")


def _check_range(name: str, values: Array, bits: int) -> None:
    readable = isinstance(values, np.ndarray | np.generic) or values.device.type == "cpu"
    if str(values.dtype).removeprefix("torch.") != "int64":
        raise ValueError(f"{name} must be int64, got {values.dtype}")
    if readable and 0 not in values.shape and (int(values.min()) < 0 or int(values.max()) >> bits):
        raise ValueError(f"{name} must be in [0, 2^{bits}), got {int(values.min())} to {int(values.max())}")
