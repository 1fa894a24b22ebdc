"""Sampling parameters: temperature, nucleus, end-of-sequence tokens, and the seed of the keyed random numbers.

Every rollout engine is started with them. They depend neither on the model nor on the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megatron_dta.common.keyed_random import Domain


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a phase.

    Attributes:
        max_response_tokens: length cap of a response, including the end of sequence; a single request may ask for less.
        eos_id: the token that ends a response; it is part of the response.
        temperature: divides the logits; 0 takes the most likely token (the lowest id among ties).
        top_p: tokens are drawn from the most likely ones that together have at least this probability.
        seed: seed of the keyed random numbers.
        domain: separates the random numbers of evaluation from those of training.
        other_eos_ids: additional tokens that end a response.
        vocab_size: ids from it on, which the tokenizer lacks, are never sampled; None: the model has no such ids.
    """

    max_response_tokens: int
    eos_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    domain: Domain = Domain.SAMPLING
    other_eos_ids: tuple[int, ...] = ()
    vocab_size: int | None = None

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """All tokens that end a response."""
        return frozenset((self.eos_id, *self.other_eos_ids))
