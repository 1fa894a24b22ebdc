"""Predicts memory per rank and seconds per step of a run, and searches for the fastest mesh of a model on a cluster.

    megatron-dta plan-run FILE --model llama3-70b --gpu h200 --num-gpus 64
    megatron-dta plan-run --sequences 512 --unique-tokens 2000000 --longest-path 16000 --samples-per-prompt 8 ...
    megatron-dta plan-run FILE --args-file examples/llama3_70b.args --num-gpus 64

FILE is a rollout file (.jsonl, .parquet or .npz) that represents one optimizer step; without FILE, give the step's
sizes as numbers. The model is a name, a Hugging Face config.json (--hf-config) or flags of the training command. With
--args-file, the model, mesh and settings come from an argument file, and only that mesh is evaluated. All settings that
no flag fixes are searched. The planners of training divide the sequences, cut them into segments and schedule them.
Seconds are predicted from operation counts and the achieved shares of the hardware peaks. If no mesh fits into memory,
the nearest ones are shown with the missing memory, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np

from megatron_dta.common.command_line import CommandLineParser, add_sample_granularity, check_at_least, print_json
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.planning.costs.element_bytes import DTYPE_BYTES
from megatron_dta.core.planning.partition.divide import trained_parts
from megatron_dta.core.rollouts.load import load_chosen_rollouts
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.core.shapes.run_mesh import RunMesh
from megatron_dta.extras.capacity.cluster import PRESETS, Cluster
from megatron_dta.extras.capacity.memory import StateSettings
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, SearchSpace, make_mesh, possible_choices
from megatron_dta.extras.capacity.report import as_json, print_misses, print_predictions
from megatron_dta.extras.capacity.search import Planner
from megatron_dta.extras.capacity.sequences import made_up_sequences
from megatron_dta.extras.capacity.settings import HELP, read_args_file, read_hf_config
from megatron_dta.extras.capacity.step_time import mesh_costs
from megatron_dta.extras.capacity.work import StepWork
from megatron_dta.families.named_shapes import SHAPES

SHAPE_FLAGS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("vocab_size", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)
MESH_FLAGS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "expert_model_parallel_size",
    "context_parallel_size",
)
STEP_FLAGS = ("sequences", "unique_tokens", "longest_path", "samples_per_prompt")
DTYPE_FLAGS = ("main_grads", "main_params", "exp_avg", "exp_avg_sq")


def parse_arguments() -> argparse.Namespace:
    parser = CommandLineParser(__doc__)
    add = parser.add_argument
    add("file", nargs="?", metavar="FILE", help="rollouts of one step: .jsonl, .parquet or .npz")
    add_sample_granularity(parser)
    modes = ("dta", "dense")
    add("--tree-mode", choices=modes, default="dta", help="compute shared prefixes once, or each sequence alone")
    for name in ("max_sequences", "max_length", *STEP_FLAGS):
        add(_flag(name), type=int, metavar="N", help=HELP[name])
    add("--model", choices=sorted(SHAPES), help="name of a model (llama3: Llama 3.1)")
    add("--hf-config", metavar="PATH", help="Hugging Face config.json, or its folder")
    add("--args-file", metavar="FILE", help="argument file of megatron_dta.train with model, mesh and settings")
    for name in SHAPE_FLAGS:
        add(_flag(name), type=int, metavar="N", help="setting of the model, in place of or in addition to --model")
    for name in ("qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights"):
        add(_flag(name), action="store_true", help="setting of the model, in place of or in addition to --model")
    add(
        "--gpu",
        choices=sorted(PRESETS),
        default="h200",
        help="preset for the cluster flags that are not given (default: %(default)s)",
    )
    for field in (field for field in fields(Cluster) if field.name in HELP):
        kind = int if field.name in ("num_gpus", "gpus_per_node") else float
        required = field.default is MISSING
        metavar, text = "N" if kind is int else "X", HELP[field.name]
        add(_flag(field.name), type=kind, metavar=metavar, required=required, help=text)
    for name in MESH_FLAGS:
        tried = "1 and 2" if "virtual" in name else "powers of two"
        add(_flag(name), type=int, nargs="+", metavar="N", help=f"sizes to try (default: {tried})")
    add("--tree-segment-tokens", type=int, nargs="+", metavar="N", help="sizes to try (default: 2048 4096 8192)")
    add(
        "--tree-memory-tokens", type=int, metavar="N", help="limit on in-flight tokens (default: chosen by the planner)"
    )
    add("--tree-activation-tokens", type=int, metavar="N", help=HELP["tree_activation_tokens"])
    kinds = ["tree", "full"]
    add("--recompute", choices=kinds, nargs="+", default=kinds, help=HELP["recompute"])
    for name in DTYPE_FLAGS:
        add(_flag(name + "_dtype"), choices=tuple(DTYPE_BYTES), default="fp32", help=HELP[name + "_dtype"])
    add(
        "--optimizer-offload-fraction",
        type=float,
        metavar="X",
        default=0.0,
        help="share of the optimizer states on the host",
    )
    add("--kv-offload-fraction", type=float, metavar="X", default=0.0, help=HELP["kv_offload_fraction"])
    add("--no-distributed-optimizer", action="store_true", help="keep all optimizer states on every replica")
    add("--no-optimizer", action="store_true", help="plan forward and backward only, as in benchmarks/train.py")
    add("--top", type=int, metavar="N", default=5, help="meshes to plan in full (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    _check(arguments)
    return arguments


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(arguments: argparse.Namespace) -> None:
    counts = ("max_sequences", "max_length", *STEP_FLAGS, *SHAPE_FLAGS, "tree_memory_tokens", "top")
    check_at_least(arguments, 1, *counts)
    for name in (*MESH_FLAGS, "tree_segment_tokens"):
        for value in getattr(arguments, name) or []:
            if value < 1:
                raise InputError(f"{_flag(name)} must be at least 1, not {value}")
    check_at_least(arguments, 0, "tree_activation_tokens")
    for name in STEP_FLAGS if arguments.file else ("max_sequences", "max_length"):
        if getattr(arguments, name) is not None:
            raise InputError(
                f"{_flag(name)} has no effect {'with' if arguments.file else 'without'} FILE; leave it out"
            )
    needed = [_flag(name) for name in STEP_FLAGS[:3] if getattr(arguments, name) is None]
    if not arguments.file and needed:
        raise InputError(f"give FILE, or numbers in its place: {', '.join(needed)}")


def read_shape(arguments: argparse.Namespace) -> DecoderShape:
    """Read the model's shape from a name, a config.json or flags."""
    sizes = {name: getattr(arguments, name) for name in SHAPE_FLAGS if getattr(arguments, name) is not None}
    switches = ("qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights")
    sizes |= {name: True for name in switches if getattr(arguments, name)}
    sources = [flag for flag in ("--model", "--hf-config") if getattr(arguments, flag[2:].replace("-", "_"))]
    if len(sources) > 1:
        raise InputError(f"{' and '.join(sources)}: give one model")
    if arguments.model is not None:
        shape = SHAPES[arguments.model]
        if "num_layers" in sizes:
            if shape.hybrid_layer_pattern is not None:
                sizes["hybrid_layer_pattern"] = shape.hybrid_layer_pattern[: sizes["num_layers"]]
            sizes["mixer_layers"] = shape.mixer_layers[: sizes["num_layers"]]
        if sizes:
            is_cut = sizes.get("num_layers", shape.num_layers) <= shape.num_layers
            sizes["moe_layers"] = shape.moe_layers[: sizes["num_layers"]] if "num_layers" in sizes and is_cut else ()
        return replace(shape, **sizes)
    if arguments.hf_config is not None:
        if sizes:
            raise InputError(f"{_flag(next(iter(sizes)))} has no effect with --hf-config; leave it out")
        return read_hf_config(arguments.hf_config)
    needed = [name for name in SHAPE_FLAGS[:7] if name not in sizes]
    if needed:
        raise InputError(f"give --model, --hf-config or --args-file, or of the model: {', '.join(map(_flag, needed))}")
    return DecoderShape(**{"untie_embeddings_and_output_weights": False} | sizes)


def read_cluster(arguments: argparse.Namespace) -> Cluster:
    values = {field.name: getattr(arguments, field.name) for field in fields(Cluster) if field.name in HELP}
    return Cluster(**{**PRESETS[arguments.gpu], **{name: value for name, value in values.items() if value is not None}})


def read_step(arguments: argparse.Namespace) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return token ids and loss masks of the sequences of the step."""
    if arguments.file is None:
        return made_up_sequences(
            arguments.sequences, arguments.unique_tokens, arguments.longest_path, arguments.samples_per_prompt or 1
        )
    return trained_parts(load_chosen_rollouts(arguments))


def read_states(arguments: argparse.Namespace) -> StateSettings:
    return StateSettings(
        **{name: getattr(arguments, name + "_dtype") for name in DTYPE_FLAGS},
        optimizer=not arguments.no_optimizer,
        distributed_optimizer=not arguments.no_distributed_optimizer,
        offload_fraction=arguments.optimizer_offload_fraction,
        kv_offload_fraction=arguments.kv_offload_fraction,
    )


def choices(arguments: argparse.Namespace, shape: DecoderShape, cluster: Cluster) -> list[Choice]:
    """Return the choices to evaluate. Raises InputError if the requested sizes allow none."""
    sizes = [getattr(arguments, name) for name in MESH_FLAGS]
    tensor, pipeline, chunks, experts, context = sizes
    space = SearchSpace(
        arguments.tree_segment_tokens,
        tensor,
        pipeline,
        chunks or SearchSpace.chunks,
        experts,
        arguments.tree_memory_tokens,
        arguments.tree_activation_tokens,
        context,
        arguments.recompute,
    )
    candidates = list(possible_choices(shape, cluster, space))
    if not candidates:
        first = [values[0] if values else 1 for values in sizes]
        # Raises an error that names the flag.
        make_mesh(shape, cluster.num_gpus, MeshSizes(*first[:4], context=first[4]))
        raise InputError(f"no mesh of {cluster.num_gpus} GPUs has the sizes that were asked for")
    return candidates


def plan(arguments: argparse.Namespace) -> dict[str, Any]:
    """Search, and return everything that is shown."""
    begin = time.perf_counter()
    cluster = read_cluster(arguments)
    if arguments.args_file is not None:
        shape, looked_at, states, arguments.args_file_gives = read_args_file(arguments.args_file, cluster.num_gpus)
    else:
        shape = read_shape(arguments)
        states = read_states(arguments)
        looked_at = choices(arguments, shape, cluster)
    sequences, masks = read_step(arguments)
    single_gpu = RunMesh(1, 1, 1, (shape.num_layers,))
    step = StepWork(sequences, masks, mesh_costs(shape, single_gpu, cluster), arguments.tree_mode)
    planner = Planner(shape, cluster, step, states)
    best, misses = planner.search(looked_at, arguments.top)
    return {
        "planner": planner,
        "best": best,
        "misses": misses[: arguments.top],
        "looked_at": len(looked_at),
        "seconds": time.perf_counter() - begin,
    }


def main() -> int:
    arguments = parse_arguments()
    planned = plan(arguments)
    if planned["best"]:
        print_predictions(planned, arguments)
    else:
        print_misses(planned)
    if arguments.json:
        print_json(as_json(planned, arguments))
    return 0 if planned["best"] else 1
