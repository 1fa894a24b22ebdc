"""Divides the layers among pipeline stages: equally, by a layout in Megatron's notation, or by predicted cost.

Virtual stages are numbered in the order in which a token passes through them: virtual stage v is model chunk v // P of
pipeline rank v % P. The first one holds the embedding, the last one the output layer and the loss.
"""

from __future__ import annotations

import re

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.planning.pipeline.layers import layers_per_stage
from megatron_dta.core.shapes.decoder import DecoderShape

_FLAG = "--pipeline-model-parallel-layout"


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Number of layers of each virtual stage.

    Raises:
        InputError: the layers cannot be divided as the settings ask.
    """
    num_stages = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    if num_stages == 1:
        return [model.num_layers]
    if parallel.pipeline_model_parallel_layout == "auto":
        return _balanced(model, num_stages, parallel.pipeline_model_parallel_size)
    if parallel.pipeline_model_parallel_layout is not None:
        return _parsed(parallel.pipeline_model_parallel_layout, model.num_layers, num_stages)
    if model.num_layers % num_stages:
        raise InputError(
            f"--num-layers {model.num_layers} is not divisible by the {num_stages} pipeline stages "
            "(--pipeline-model-parallel-size x --num-virtual-stages-per-pipeline-rank); change one of them, or give "
            f"{_FLAG} auto"
        )
    return [model.num_layers // num_stages] * num_stages


def _balanced(model: ModelConfig, num_stages: int, num_ranks: int) -> list[int]:
    if model.num_layers < num_stages:
        raise InputError(f"--num-layers {model.num_layers} is less than the {num_stages} pipeline stages; use fewer")
    # Without a vocabulary size, which the tokenizer then decides, the output layer counts nothing.
    cost = CostModel.from_shape(DecoderShape.of(model, vocab_size=model.vocab_size or 1))
    return layers_per_stage(
        model.num_layers,
        num_stages,
        layer_cost=cost.seconds_per_token / model.num_layers,
        output_cost=cost.seconds_per_edge,
        num_stages=num_ranks,
    )


def _parsed(layout: str, num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage of a layout in Megatron's notation: "Et*3|t*4|tttL" -> [3, 4, 3]."""
    text = layout.replace(",", "").replace(" ", "")
    for group in (r"\(([^()]+)\)\*(\d+)", r"([EtL|])\*(\d+)"):
        text = re.sub(group, lambda match: match[1] * int(match[2]), text)
    if not re.fullmatch(r"E[t|]*L", text):
        raise InputError(
            f"{_FLAG} {layout}: must be 'auto', or begin with E, end with L, and hold t and | between, as in 'Ett|ttL'"
        )
    layers = [stage.count("t") for stage in text.split("|")]
    if len(layers) != num_stages:
        raise InputError(
            f"{_FLAG} {layout} has {len(layers)} stages, but there are {num_stages} (--pipeline-model-parallel-size x "
            "--num-virtual-stages-per-pipeline-rank)"
        )
    if sum(layers) != num_layers:
        raise InputError(f"{_FLAG} {layout} has {sum(layers)} layers, but --num-layers is {num_layers}")
    if 0 in layers[1:-1]:
        raise InputError(f"{_FLAG} {layout}: stage {layers.index(0, 1)} has no layer; give it one")
    return layers
