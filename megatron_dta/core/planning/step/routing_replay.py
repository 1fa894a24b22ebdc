"""Replays the sampler's routing in training: the experts that it chose for every token.

The sampler's router and the trainer's differ by rounding errors, so a token near a decision boundary may go to another
expert, which is another function of its input. With replay, the trainer uses the sampler's choice and computes the
weights of the chosen experts with its own router (routing replay, arXiv 2510.11370).

Rollouts that share a token were sampled in separate passes and may have routed it differently. A shared token is
computed once, so there are two ways (``--moe-routing-replay``), both fixed for the whole step before it is divided
among ranks:

first   The choice of the first rollout of the step that has one holds for all. The metric ``routing_replaced`` says how
        many choices it replaces.
fork    Rollouts share a token only where they were routed the same way, so every choice is the sampler's. The forest is
        built from keys (``keys_by_routing``), which differ where the choices do. ``routing_forked_tokens`` is the
        number of unique tokens divided by that of "first"; it is reported either way.

Legend: T tokens of a sequence, N stream tokens, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.tree import PrefixTree, build_prefix_tree

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


def keys_by_routing(sequences: Sequence[np.ndarray], routing: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Keys int32 [T] of every sequence: equal where the tokens and their prefixes are and the choices are the same.

    The order of a token's experts does not matter. A token whose choices are all unknown, like the last one of a
    rollout, joins the first rollout through it that knows them.
    """
    if not len(sequences):
        return []
    tree = build_prefix_tree(sequences)
    stream, offsets = tree.stream_indices_of(np.arange(len(sequences)))
    choices = np.concatenate([_choice_numbers(experts) for experts in routing])
    known = choices != 0
    first = np.zeros(tree.num_tokens, dtype=np.int64)
    # The last assignment to an entry holds.
    first[stream[known][::-1]] = choices[known][::-1]
    choices = np.where(known, choices, first[stream])
    order = np.lexsort((choices, stream))
    is_new = np.ones(len(order), dtype=bool)
    is_new[1:] = (stream[order[1:]] != stream[order[:-1]]) | (choices[order[1:]] != choices[order[:-1]])
    is_token = np.ones(len(order), dtype=bool)
    is_token[1:] = stream[order[1:]] != stream[order[:-1]]
    pair = np.cumsum(is_new) - 1
    variant = np.empty(len(order), dtype=np.int64)
    variant[order] = pair - np.maximum.accumulate(np.where(is_token, pair, 0))
    tokens = np.concatenate(sequences).astype(np.int64)
    keys = variant * (int(tokens.max()) + 1) + tokens
    if keys.max() > np.iinfo(np.int32).max:
        keys = np.unique(keys, return_inverse=True)[1]
    return np.split(keys.astype(np.int32), offsets[1:-1])


def _choice_numbers(routing: np.ndarray) -> np.ndarray:
    """A number int64 [T] for the sets of experts of each token; 0 if all of them are unknown."""
    flat = np.sort(routing, axis=-1).reshape(len(routing), -1)
    factors = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, flat.shape[1], dtype=np.int64) | 1
    numbers = np.zeros(len(flat), dtype=np.int64)
    with np.errstate(over="ignore"):
        for column, factor in zip(flat.T, factors, strict=True):
            numbers += (column.astype(np.int64) + 2) * factor
    return np.where((flat == UNKNOWN).all(axis=1), 0, numbers)


def replaced_share(routing: Sequence[np.ndarray], agreed: Sequence[np.ndarray]) -> float:
    """Fraction of the sampler's choices, one per token and layer of a sequence, that ``agree_on_routing`` replaced.

    The order of a token's experts does not matter, and unknown choices do not count.
    """
    known = replaced = 0
    for experts, replayed in zip(routing, agreed, strict=True):
        is_known = experts[..., 0] != UNKNOWN
        known += int(is_known.sum())
        replaced += int((is_known & (np.sort(experts, axis=-1) != np.sort(replayed, axis=-1)).any(axis=-1)).sum())
    return replaced / max(1, known)


def stream_routing(tree: PrefixTree, routing: Sequence[np.ndarray]) -> np.ndarray:
    """Routing of the stream's tokens, int16 [N, L, K]; raises ValueError if two sequences disagree on a token."""
    experts = np.full((tree.num_tokens, *routing[0].shape[1:]), UNKNOWN, dtype=np.int16)
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        experts[path] = choice[: len(path)]
    for sequence, choice in enumerate(routing):
        path = tree.stream_indices(sequence)
        if not np.array_equal(experts[path], choice[: len(path)]):
            raise ValueError(f"sample {sequence} is routed otherwise than another through the same tokens")
    return experts
