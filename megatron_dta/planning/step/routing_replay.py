"""Routing that rollouts bring along: the experts that their sampler chose for every token.

A sampler's router and the trainer's differ by roundings, and a token near the border goes to another expert: to another
function of its input. With replay the trainer takes the sampler's choice, and computes the weights of the chosen
experts with its own router (routing replay, arXiv 2510.11370).

Rollouts that share a token were sampled in passes of their own, and may have been routed differently there. A shared
token is computed once, so one choice has to hold: that of the step's first rollout through the token which has it. It
is made for the whole step before it is divided among ranks, and so does not depend on them. How much it replaces is a
metric (``routing_replaced``).

Legend: T tokens of a sequence, N stream tokens, L layers with experts, K experts a token is routed to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.tree import PrefixTree, build_prefix_tree

UNKNOWN = -1


def shaped_routing(routed_experts: np.ndarray, length: int, num_layers: int, topk: int, num_experts: int) -> np.ndarray:
    """A rollout's flat record as int16 [T, L, K]; ``InputError`` where it is not of such a model."""
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
    """The routing [T, L, K] of every sequence, the same wherever sequences share a token; see the top of the file."""
    if not len(sequences):
        return []
    tree = build_prefix_tree(sequences)
    paths = [tree.stream_indices(sequence) for sequence in range(len(sequences))]
    agreed = np.full((tree.num_tokens, *routing[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for path, choice in zip(paths, routing, strict=True):
        agreed[path] = np.where(agreed[path] == UNKNOWN, choice, agreed[path])
    return [agreed[path] for path in paths]


def replaced_share(routing: Sequence[np.ndarray], agreed: Sequence[np.ndarray]) -> float:
    """Fraction of the sampler's choices, one for each token and layer of a sequence, that others took the place of.

    The order of a token's experts does not matter, and what the sampler did not say does not count.
    """
    known = replaced = 0
    for own, taken in zip(routing, agreed, strict=True):
        said = own[..., 0] != UNKNOWN
        known += int(said.sum())
        replaced += int((said & (np.sort(own, axis=-1) != np.sort(taken, axis=-1)).any(axis=-1)).sum())
    return replaced / max(1, known)


def stream_routing(tree: PrefixTree, routing: Sequence[np.ndarray]) -> np.ndarray:
    """Routing int16 [N, L, K] of the stream's tokens, from that of each sequence; they must agree (``ValueError``)."""
    found = np.full((tree.num_tokens, *routing[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        found[path] = choice[: len(path)]
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        if not np.array_equal(found[path], choice[: len(path)]):
            raise ValueError(f"sample {sequence} is routed otherwise than another through the same tokens")
    return found
