"""Replays the sampler's routing in training: the experts that it chose for every token.

The sampler's router and the trainer's differ by rounding errors, so a token near a decision boundary may go to another
expert, which is another function of its input. With replay, the trainer uses the sampler's choice and computes the
weights of the chosen experts with its own router (routing replay, arXiv 2510.11370).

Rollouts that share a token were sampled in separate passes and may have routed it differently. A shared token is
computed once, so one choice must hold: that of the first rollout of the step that has one. It is fixed for the whole
step before the step is divided among ranks, so it does not depend on them. The metric ``routing_replaced`` says how
many choices it replaces.

Legend: T tokens of a sequence, N stream tokens, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.tree import PrefixTree, build_prefix_tree

UNKNOWN = -1


def shaped_routing(routed_experts: np.ndarray, length: int, num_layers: int, topk: int, num_experts: int) -> np.ndarray:
    """Reshape a rollout's flat record to int16 [T, L, K]; raises InputError if it does not fit the model."""
    if len(routed_experts) != length * num_layers * topk:
        raise InputError(
            f"field 'routed_experts': has {len(routed_experts)} entries, but {length} tokens x {num_layers} layers "
            f"with experts x {topk} experts a token are {length * num_layers * topk}"
        )
    shaped = routed_experts.reshape(length, num_layers, topk)
    ranked = np.sort(shaped, axis=-1)
    partly = (ranked[..., 0] == UNKNOWN) & (ranked[..., -1] != UNKNOWN)
    twice = ((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] != UNKNOWN)).any(axis=-1)
    for bad, reason in (
        (ranked[..., -1] >= num_experts, f"beyond the {num_experts} experts"),
        (partly, "unknown in part"),
        (twice, "the same expert twice"),
    ):
        if bad.any():
            token, layer = np.argwhere(bad)[0].tolist()
            raise InputError(
                f"field 'routed_experts': token {token}, layer {layer} is {shaped[token, layer].tolist()}, {reason}"
            )
    return shaped


def agree_on_routing(sequences: Sequence[np.ndarray], routing: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The routing [T, L, K] of every sequence, equal on shared tokens: the first known choice replaces the others."""
    if not len(sequences):
        return []
    tree = build_prefix_tree(sequences)
    paths = [tree.stream_indices(sequence) for sequence in range(len(sequences))]
    agreed = np.full((tree.num_tokens, *routing[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for path, choice in zip(paths, routing, strict=True):
        agreed[path] = np.where(agreed[path] == UNKNOWN, choice, agreed[path])
    return [agreed[path] for path in paths]


def replaced_share(routing: Sequence[np.ndarray], agreed: Sequence[np.ndarray]) -> float:
    """Fraction of the sampler's choices, one per token and layer of a sequence, that ``agree_on_routing`` replaced.

    The order of a token's experts does not matter, and unknown choices do not count.
    """
    known = replaced = 0
    for own, taken in zip(routing, agreed, strict=True):
        said = own[..., 0] != UNKNOWN
        known += int(said.sum())
        replaced += int((said & (np.sort(own, axis=-1) != np.sort(taken, axis=-1)).any(axis=-1)).sum())
    return replaced / max(1, known)


def stream_routing(tree: PrefixTree, routing: Sequence[np.ndarray]) -> np.ndarray:
    """Routing of the stream's tokens, int16 [N, L, K]; raises ValueError if two sequences disagree on a token."""
    found = np.full((tree.num_tokens, *routing[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        found[path] = choice[: len(path)]
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        if not np.array_equal(found[path], choice[: len(path)]):
            raise ValueError(f"sample {sequence} is routed otherwise than another through the same tokens")
    return found
