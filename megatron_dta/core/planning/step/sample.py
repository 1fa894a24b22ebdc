"""Defines a training sample: tokens, a mask of the trained ones, and the numbers that the loss needs.

A ``Rollout`` is a sampled sequence. A ``TrainingSample`` holds the same tokens with advantages computed and old and
reference logprobs filled in. Only trained tokens reach the loss; the values at other positions are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from megatron_dta.core.tree.known_paths import KnownPath


FIELDS = (
    "advantages",
    "old_logprobs",
    "ref_logprobs",
    "rollout_logprobs",
    "old_values",
    "returns",
    "pair_gradient",
    "pair_loss",
)
_OF_TOKENS = ("loss_mask", *FIELDS, "routed_experts", "tree_keys")


@dataclass(frozen=True)
class TrainingSample:
    """One sequence of T tokens.

    Attributes:
        token_ids: int32 [T].
        loss_mask: bool [T], True at trained tokens; False at position 0, which no prefix predicts.
        advantages: float [T], or None for objectives without them.
        old_logprobs: float [T], logprobs under the sampling policy; None to use the current policy's own.
        ref_logprobs: float [T], logprobs under the reference model, or None.
        rollout_logprobs: float [T], logprobs that the sampler recorded, or None.
        old_values, returns: float [T], the critic's values before the rollout batch's first step, and its targets.
        pair_gradient, pair_loss: float [T], gradient and loss of pairwise objectives; the engine fills them in.
        routed_experts: int16 [T, L, K], experts of each token in each layer with experts, -1 for the router's own
            choice; or None.
        weight: weight of the sequence in the means of the loss.
        teacher: number of the teacher that scores the sequence, if there are teachers.
        path: the sequence's nodes in the sampled trees, if known; ids are shared by all samples of a batch.
        tree_keys: int32 [T], samples share a prefix where these are equal; None where the tokens are. Equal prefixes
            of keys must be of equal tokens.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    advantages: np.ndarray | None = None
    old_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None
    rollout_logprobs: np.ndarray | None = None
    old_values: np.ndarray | None = None
    returns: np.ndarray | None = None
    pair_gradient: np.ndarray | None = None
    pair_loss: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    weight: float = 1.0
    teacher: int = 0
    path: KnownPath | None = None
    tree_keys: np.ndarray | None = None

    def __post_init__(self) -> None:
        fields, length = vars(self), len(self.token_ids)
        if length == 0:
            raise ValueError("a training sample needs at least one token")
        for name in _OF_TOKENS:
            if fields[name] is not None and len(fields[name]) != length:
                raise ValueError(f"{name} has {len(fields[name])} entries for {length} tokens")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is true, but no prefix predicts the first token")

    def with_fields(self, **fields: np.ndarray) -> TrainingSample:
        """A copy with other loss fields (``FIELDS``), in a fraction of the time of ``dataclasses.replace``."""
        sample = object.__new__(TrainingSample)
        vars(sample).update(vars(self), **fields)
        sample.__post_init__()
        return sample

    @property
    def keys(self) -> np.ndarray:
        """Integers [T] by which samples share prefixes."""
        return self.token_ids if self.tree_keys is None else self.tree_keys

    @cached_property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))

    @cached_property
    def needed_length(self) -> int:
        """Number of tokens up to and including the last trained one, or 0 without trained tokens.

        Later tokens cannot influence the loss.
        """
        behind = int(self.loss_mask[::-1].argmax())
        return len(self.loss_mask) - behind if self.loss_mask[-1 - behind] else 0
