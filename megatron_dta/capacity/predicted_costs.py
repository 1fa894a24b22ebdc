"""Flags of the commands that predict seconds, the cost model that they select, and a description of its source."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron_dta.capacity.cluster import PRESETS, Cluster
from megatron_dta.capacity.memory import RunMesh
from megatron_dta.capacity.step_time import calibrated, mesh_costs
from megatron_dta.common.errors import InputError
from megatron_dta.planning.costs.decoder_shape import DecoderShape
from megatron_dta.planning.costs.file import CostFile, load_cost_model
from megatron_dta.planning.costs.model import CostModel
from megatron_dta.planning.costs.named_shapes import SHAPES

# The default shape, and its sizes that have a flag.
DEFAULT = "Qwen3-32B"
_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
SHAPE = {name: getattr(SHAPES[DEFAULT.lower()], name) for name in (*_FLAGS, "vocab_size")}
COUNTED = "operations at assumed rates of an H200"


def add_cost_flags(parser: argparse.ArgumentParser) -> list[str]:
    """Add ``--cost-model``, ``--model`` and the flags of a shape; return the flags whose value must be at least 1."""
    parser.add_argument(
        "--cost-model",
        metavar="JSON",
        help="file of megatron-dta fit-cost-model, or a file of coefficients, in place of counted costs; --num-layers "
        "scales the measured layers",
    )
    parser.add_argument(
        "--model",
        choices=sorted(SHAPES),
        help=f"name of a model (default: {DEFAULT}); with --cost-model, its costs are scaled from the measurements of "
        "another model",
    )
    flags = []
    for name, value in SHAPE.items():
        flags.append("--" + name.replace("_", "-"))
        parser.add_argument(flags[-1], type=int, metavar="N", help=f"setting of the model (default: {value})")
    return flags


def read_costs(arguments: argparse.Namespace) -> tuple[CostModel, str]:
    """Return the cost model of a file, a named model or a shape, and its source: model, GPU and method."""
    given = {name: getattr(arguments, name) for name in SHAPE if getattr(arguments, name) is not None}
    for name in given.keys() - {"num_layers"}:
        for flag in ("--cost-model", "--model"):
            if getattr(arguments, flag[2:].replace("-", "_")) is not None:
                raise InputError(f"--{name.replace('_', '-')} has no effect with {flag}; give one of the two")
    path = arguments.cost_model
    model, measured = (None, None) if path is None else load_cost_model(path)
    if arguments.model is not None:
        if model is not None and measured is None:
            raise InputError(f"--model: {path} has coefficients of one model; give one of the two")
        rates = COUNTED if measured is None else f"scaled from what {Path(path).name} measured of another model"
        return _scaled_costs(arguments, measured), f"{arguments.model} on H200s, {rates}"
    if measured is not None:
        # The default number of layers is the measured model's.
        arguments.num_layers = arguments.num_layers or measured.num_layers
        return measured.model(arguments.num_layers), f"measured on a machine ({path}), {arguments.num_layers} layers"
    if model is not None:
        return model, f"coefficients of {path}"
    shape = SHAPE | given
    name = DEFAULT if shape == SHAPE else "a model of " + ", ".join(f"{key} {value}" for key, value in given.items())
    return CostModel.from_shape(DecoderShape(**shape)), f"{name} on an H200, {COUNTED} (--model, --cost-model)"


def _scaled_costs(arguments: argparse.Namespace, measured: CostFile | None) -> CostModel:
    """Costs of a named model on H200s, with the shares of the peaks that were measured on another model."""
    shape = SHAPES[arguments.model]
    arguments.num_layers = arguments.num_layers or shape.num_layers
    layers = arguments.num_layers
    shape = replace(
        shape,
        num_layers=layers,
        moe_layers=shape.moe_layers[:layers],
        linear_attention_layers=shape.linear_attention_layers[:layers],
        moe_grouped_gemm=shape.num_experts is not None,
    )
    cluster = Cluster(**PRESETS["h200"] | {"num_gpus": 8})
    if measured is not None:
        cluster = calibrated(cluster, measured)
    mesh = RunMesh(1, 1, 1, (shape.num_layers,))
    return mesh_costs(shape, mesh, cluster, None if measured is None else measured.model())
