"""Divides the layers of a model over virtual stages, taking the embedding and the output layer into account.

All layers have the same cost, and the slowest rank determines the speed of the pipeline. Layers are assigned one at a
time to the rank with the lowest cost; since layers are equal, no division has a faster slowest rank. Within a rank, a
layer goes to the virtual stage with the lowest cost. Ties go to the last rank, as the first ranks have most segments in
flight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_dta.common.errors import InputError


def layers_per_stage(
    num_layers: int,
    num_virtual_stages: int,
    layer_cost: float = 1.0,
    embedding_cost: float = 0.0,
    output_cost: float = 0.0,
    num_stages: int | None = None,
    allow_empty: bool = False,
) -> list[int]:
    """Return the layers of each virtual stage that make the slowest rank as fast as possible.

    Args:
        num_layers: decoder layers of the model.
        num_virtual_stages: number of virtual stages, V.
        layer_cost, embedding_cost, output_cost: times of a layer, of the embedding (first virtual stage) and of the
            final norm, logits and loss (last one), in the same unit.
        num_stages: ranks; virtual stage v is on rank v modulo num_stages. None means one rank per virtual stage.
        allow_empty: whether a virtual stage may have no layers.

    Returns:
        V numbers with the sum num_layers.

    Raises:
        InputError: there are fewer layers than virtual stages, and not ``allow_empty``.
        ValueError: a size or cost is negative or invalid.
    """
    ranks = num_virtual_stages if num_stages is None else num_stages
    costs = (layer_cost, embedding_cost, output_cost)
    if num_virtual_stages < 1 or num_layers < 0 or ranks < 1 or num_virtual_stages % ranks:
        raise ValueError(f"{num_layers} layers on {num_virtual_stages} virtual stages of {ranks} ranks")
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"costs of layers, embedding and output must be finite and not negative: {costs}")
    if num_layers < num_virtual_stages and not allow_empty:
        raise InputError(_too_few(num_layers, num_virtual_stages))
    layers = [0 if allow_empty else 1] * num_virtual_stages
    extra = [0.0] * num_virtual_stages
    extra[0] += embedding_cost
    extra[-1] += output_cost
    for _ in range(num_layers - sum(layers)):
        rank = min(
            range(ranks),
            key=lambda r: (layer_cost * sum(layers[r::ranks]) + sum(extra[r::ranks]), sum(layers[r::ranks]), -r),
        )
        v = min(
            range(rank, num_virtual_stages, ranks), key=lambda v: (layer_cost * layers[v] + extra[v], layers[v], -v)
        )
        layers[v] += 1
    return layers


def check_layers_per_stage(
    layers: Sequence[int],
    num_layers: int,
    num_virtual_stages: int,
    flag: str = "--pipeline-layers-per-stage",
    allow_empty: bool = False,
) -> list[int]:
    """Check a list of layers given by a user, and return it.

    Raises InputError naming ``flag`` if the number of entries is not that of the virtual stages, a stage is negative or
    empty, or the sum is not the model's number of layers.
    """
    least = 0 if allow_empty else 1
    shown = ",".join(map(str, layers))
    if len(layers) != num_virtual_stages:
        raise InputError(
            f"{flag} {shown}: has {len(layers)} entries for {num_virtual_stages} (virtual) pipeline stages"
        )
    for stage, count in enumerate(layers):
        if count < least:
            raise InputError(f"{flag} {shown}: stage {stage} has {count} layers; each must have at least {least}")
    if sum(layers) != num_layers:
        raise InputError(f"{flag} {shown}: adds up to {sum(layers)} layers, but --num-layers is {num_layers}")
    return list(layers)


def _too_few(num_layers: int, num_virtual_stages: int) -> str:
    return (
        f"--num-layers {num_layers} is less than the {num_virtual_stages} (virtual) stages of the pipeline, each of "
        "which must have a layer; lower --pipeline-model-parallel-size or raise --num-layers-per-virtual-pipeline-stage"
    )


def balanced_shares(
    num_stages: int, num_chunks: int, layers_cost: float, embedding_cost: float = 0.0, output_cost: float = 0.0
) -> list[float]:
    """Return shares of the layers that give every rank the same time, for studies with fractions of layers.

    A rank whose embedding or output layer alone takes longer gets no layers.

    Args:
        layers_cost: time of all layers together.

    Returns:
        Share of each virtual stage; the sum is 1.
    """
    extra = [0.0] * (num_stages * num_chunks)
    extra[0] += embedding_cost
    extra[-1] += output_cost
    shares = _fill([sum(extra[rank::num_stages]) for rank in range(num_stages)], layers_cost)
    result = [0.0] * len(extra)
    for rank, share in enumerate(shares):
        result[rank::num_stages] = _fill(extra[rank::num_stages], share)
    total = sum(result)
    return [share / total for share in result] if total else [1.0 / len(extra)] * len(extra)


def _fill(levels: list[float], amount: float) -> list[float]:
    """Distribute ``amount`` so that the lowest levels rise to a common height."""
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))
    height, used = levels[order[0]], 0.0
    for count, index in enumerate(order, start=1):
        above = levels[order[count]] if count < len(order) else math.inf
        needed = used + count * (above - levels[index])
        if needed >= amount:
            height = levels[index] + (amount - used) / count
            break
        used = needed
    return [max(0.0, height - level) for level in levels]
