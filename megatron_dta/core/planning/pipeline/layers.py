"""Divides the layers of a model over virtual stages, taking the output layer into account.

All layers have the same cost, and the slowest rank determines the speed of the pipeline. Layers are assigned one at a
time to the rank with the lowest cost; since layers are equal, no division has a faster slowest rank. Within a rank, a
layer goes to the virtual stage with the lowest cost. Ties go to the last rank, as the first ranks have most segments in
flight.
"""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError


def layers_per_stage(
    num_layers: int,
    num_virtual_stages: int,
    layer_cost: float = 1.0,
    output_cost: float = 0.0,
    num_stages: int | None = None,
) -> list[int]:
    """Return the layers of each virtual stage that make the slowest rank as fast as possible.

    Args:
        num_layers: decoder layers of the model.
        num_virtual_stages: number of virtual stages, V.
        layer_cost, output_cost: times of a layer, and of the logits and loss (last virtual stage), in the same unit.
        num_stages: ranks; virtual stage v is on rank v modulo num_stages. None means one rank per virtual stage.

    Returns:
        V numbers with the sum num_layers.

    Raises:
        InputError: there are fewer layers than virtual stages.
        ValueError: a size or cost is negative or invalid.
    """
    ranks = num_virtual_stages if num_stages is None else num_stages
    if num_virtual_stages < 1 or num_layers < 0 or ranks < 1 or num_virtual_stages % ranks:
        raise ValueError(f"{num_layers} layers on {num_virtual_stages} virtual stages of {ranks} ranks")
    if num_layers < num_virtual_stages:
        raise InputError(
            f"--num-layers {num_layers} is less than the {num_virtual_stages} (virtual) stages of the pipeline, each "
            "of which must have a layer; lower --pipeline-model-parallel-size or raise "
            "--num-layers-per-virtual-pipeline-stage"
        )
    layers = [1] * num_virtual_stages
    extra = [0.0] * (num_virtual_stages - 1) + [output_cost]
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
