"""Flags of the scripts that predict seconds, the cost model that they select, and a description of its source."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.model import CostModel
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import PRESETS, Cluster
from megatron_dta.extras.capacity.step_time import mesh_costs
from megatron_dta.families.named_shapes import SHAPES

# The default shape, and its sizes that have a flag.
DEFAULT = "Qwen3-32B"
_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
SHAPE = {name: getattr(SHAPES[DEFAULT.lower()], name) for name in (*_FLAGS, "vocab_size")}
COUNTED = "operations at assumed rates of an H200"


def add_cost_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Add ``--model`` and the flags of a shape; return the flags whose value must be at least 1."""
    parser.add_argument("--model", choices=sorted(SHAPES), help=f"name of a model (default: {DEFAULT})")
    flags = []
    for name, value in SHAPE.items():
        flags.append("--" + name.replace("_", "-"))
        parser.add_argument(flags[-1], type=int, metavar="N", help=f"setting of the model (default: {value})")
    return flags


def read_costs(arguments: argparse.Namespace) -> tuple[CostModel, str]:
    """Return the cost model of a named model or of a shape, and its source: model, GPU and method."""
    sizes = {name: getattr(arguments, name) for name in SHAPE if getattr(arguments, name) is not None}
    if arguments.model is not None:
        ignored = sorted(sizes.keys() - {"num_layers"})
        if ignored:
            raise InputError(f"--{ignored[0].replace('_', '-')} has no effect with --model; give one of the two")
        return _costs_of_named_model(arguments), f"{arguments.model} on H200s, {COUNTED}"
    shape = SHAPE | sizes
    name = DEFAULT if shape == SHAPE else "a model of " + ", ".join(f"{key} {value}" for key, value in sizes.items())
    return CostModel.from_shape(DecoderShape(**shape)), f"{name} on an H200, {COUNTED} (--model)"


def _costs_of_named_model(arguments: argparse.Namespace) -> CostModel:
    shape = SHAPES[arguments.model]
    arguments.num_layers = arguments.num_layers or shape.num_layers
    layers = arguments.num_layers
    shape = replace(
        shape,
        num_layers=layers,
        moe_layers=shape.moe_layers[:layers],
        mixer_layers=shape.mixer_layers[:layers],
    )
    cluster = Cluster(**PRESETS["h200"] | {"num_gpus": 8})
    return mesh_costs(shape, RunMesh(1, 1, 1, (layers,)), cluster)
