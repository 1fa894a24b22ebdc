"""Formats the predictions of ``plan_run.py``: tables, JSON, and the commands that run the best mesh."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import asdict
from typing import Any

from rich.table import Table

from megatron_dta.common.console import Console
from megatron_dta.core.planning.costs.memory_budget import GIB
from megatron_dta.core.planning.step.flops import StepCounts
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.extras.capacity.search import Planner, Prediction
from megatron_dta.families.named_shapes import HUB_NAMES, SHAPES

MEMORY_NAMES = {"keys_values": "K, V, dK, dV of paths", "workspace": "workspace, communication"}
TIME_NAMES = {
    "gemm": "GEMM of the layers",
    "tensor": "tensor, sequence, context, expert communication",
    "launches": "waiting for launches",
    "bubble": "pipeline bubble",
    "experts": "waiting for ranks of the expert group",
    "data": "data-parallel reduction",
}


def describe(prediction: Prediction) -> str:
    """Short description of a mesh."""
    choice, mesh = prediction.choice, prediction.choice.mesh
    pipeline = f"PP {mesh.pipeline}" + (f" x {mesh.chunks}" if mesh.chunks > 1 else "")
    experts = f", EP {mesh.experts}" + (f" x ETP {mesh.expert_tensor}" if mesh.expert_tensor > 1 else "")
    context = f", CP {mesh.context}" if mesh.context > 1 else ""
    shown = f"TP {mesh.tensor}{' SP' if mesh.sequence_parallel else ''}{context}, {pipeline}, DP {mesh.data}"
    shown += experts if mesh.experts > 1 or mesh.expert_tensor > 1 else ""
    if len(set(mesh.layers)) > 1:
        shown += ", auto"
    if choice.full_recompute:
        return shown + ", full recompute"
    return shown + ("" if choice.activation_tokens is None else f", {choice.activation_tokens:,} kept")


def useful_share(planner: Planner, prediction: Prediction) -> float:
    """Necessary operations of the step over the peak of all GPUs in its time."""
    partition = planner.step.partition(1)
    counts = partition.tokens_per_rank, partition.pairs_per_rank, partition.edges_per_rank
    flops = StepCounts(*(int(per_rank[0]) for per_rank in counts)).flops(planner.shape)
    peak = planner.cluster.gemm_tflops * 1e12 * planner.cluster.num_gpus
    return flops / prediction.time.total / peak


def as_json(planned: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of ``--json``."""
    planner: Planner = planned["planner"]
    memory = planner.cluster.gpu_memory_gib

    def row(prediction: Prediction) -> dict[str, Any]:
        choice = prediction.choice
        return {
            "mesh": asdict(choice.mesh),
            "segment_tokens": prediction.work.segment_tokens,
            "tree_segment_tokens": choice.segment_tokens,
            "tree_activation_tokens": choice.activation_tokens,
            "full_recompute": choice.full_recompute,
            "memory_gib": {name: value / GIB for name, value in prediction.memory.parts().items()},
            "memory_total_gib": prediction.memory.total / GIB,
            "host_gib": prediction.memory.host / GIB,
            "missing_gib": max(0.0, prediction.misses(memory)),
            "stage": prediction.stage,
            "seconds": prediction.time.parts(),
            "step_seconds": prediction.time.total,
            "pipeline_utilisation": prediction.utilisation,
            "imbalance": prediction.imbalance,
            "recomputed": prediction.recomputed,
            "segments": prediction.work.segments,
            "share_of_gemm_peak": useful_share(planner, prediction),
            "unique_tokens_per_second": planner.step.unique_tokens / prediction.time.total,
        }

    return {
        "parameters": planner.shape.num_parameters,
        "sequences": len(planner.step.sequences),
        "tokens": planner.step.tokens,
        "unique_tokens": planner.step.unique_tokens,
        "longest_sequence": planner.step.longest,
        "cluster": asdict(planner.cluster),
        "looked_at": planned["looked_at"],
        "planning_seconds": planned["seconds"],
        "best": [row(prediction) for prediction in planned["best"]],
        "misses": [row(prediction) for prediction in planned["misses"]],
        "commands": commands(planner, planned["best"][0], arguments) if planned["best"] else [],
    }


def print_predictions(planned: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print the ranking, and the parts of the best mesh's memory and time."""
    planner, best = planned["planner"], planned["best"]
    console = Console()
    console.print(_title(planned))
    table = Table(title="best meshes, fastest first (predictions)", title_justify="left")
    for column in ("mesh", "segments", "step (s)", "GiB", "utilisation", "slowest / mean", "of GEMM peak"):
        table.add_column(column, justify="left" if column == "mesh" else "right")
    for prediction in best:
        table.add_row(
            describe(prediction),
            f"{prediction.work.segments:,} x {prediction.work.segment_tokens:,}",
            f"{prediction.time.total:,.3g}",
            f"{prediction.memory.total / GIB:.1f}",
            f"{prediction.utilisation:.3f}",
            f"{prediction.imbalance:.3f}",
            f"{useful_share(planner, prediction):.3f}",
        )
    console.print(table)
    first = best[0]
    console.print(_parts("memory of a rank (GiB)", first.memory.parts(), GIB, MEMORY_NAMES, first.memory.total))
    if first.memory.host:
        console.print(f"on the host: {first.memory.host / GIB:.1f} GiB a process")
    console.print(_parts("step (seconds)", first.time.parts(), 1.0, TIME_NAMES, first.time.total))
    print(cost_source(planner, arguments))
    for command in commands(planner, first, arguments):
        print(command)
    for note in placeholders(planner, arguments):
        print(note)


def cost_source(planner: Planner, arguments: argparse.Namespace) -> str:
    """Model, GPU and source of the predicted seconds."""
    model = arguments.model or arguments.hf_config or arguments.args_file or "the model"
    peak = f"{planner.cluster.gemm_tflops:g} TFLOP/s"
    return f"seconds: {model} on {arguments.gpu}, operations at assumed shares of the peaks ({peak})"


def print_misses(planned: dict[str, Any]) -> None:
    """Print the nearest meshes that do not fit, their missing memory and their largest parts."""
    planner, console = planned["planner"], Console()
    console.print(_title(planned))
    memory = planner.cluster.gpu_memory_gib
    table = Table(title=f"nothing fits {memory:g} GiB a GPU; the nearest", title_justify="left")
    for column in ("mesh", "GiB", "missing", "largest parts"):
        table.add_column(column, justify="left" if column in ("mesh", "largest parts") else "right")
    for prediction in planned["misses"]:
        parts = sorted(prediction.memory.parts().items(), key=lambda part: -part[1])[:3]
        shown = ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts)
        table.add_row(
            describe(prediction), f"{prediction.memory.total / GIB:.1f}", f"{prediction.misses(memory):.1f}", shown
        )
    console.print(table)


def _title(planned: dict[str, Any]) -> str:
    planner: Planner = planned["planner"]
    step, cluster = planner.step, planner.cluster
    return (
        f"{planner.shape.num_parameters / 1e9:,.1f} billion parameters on {cluster.num_gpus:,} GPUs; "
        f"{len(step.sequences):,} sequences, {step.unique_tokens:,} of {step.tokens:,} tokens unique, longest "
        f"{step.longest:,}; {planned['looked_at']:,} meshes in {planned['seconds']:.1f} s"
    )


def _parts(title: str, parts: dict[str, float], unit: float, names: dict[str, str], total: float) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("", justify="right")
    for name, value in parts.items():
        if value:
            table.add_row(names.get(name, name), f"{value / unit:,.2f}")
    table.add_section()
    table.add_row("together", f"{total / unit:,.2f}")
    return table


def train_flags(planner: Planner, prediction: Prediction, arguments: argparse.Namespace) -> list[str]:
    """Arguments of ``megatron_dta.train`` for a prediction. An argument file provides its own model and mesh."""
    if arguments.args_file is not None:
        flags = [f"@{arguments.args_file}"]
    else:
        flags = _model_flags(planner, arguments) + _mesh_flags(planner, prediction)
    step = planner.step
    flags += ["--rollouts", arguments.file or "ROLLOUTS", "--global-batch-size", str(len(step.sequences))]
    return flags + own_flags(planner, arguments)


def own_flags(planner: Planner, arguments: argparse.Namespace) -> list[str]:
    """Flags of the initial checkpoint and of the run's folder, unless an argument file names them."""
    flags, named = [], arguments.args_file_gives if arguments.args_file is not None else ()
    hub_name = checkpoint_of(planner.shape)
    if arguments.hf_config is not None:
        flags += ["--load-hf", arguments.hf_config.removesuffix("/config.json")]
    elif hub_name is not None and "load_hf" not in named:
        flags += ["--load-hf", hub_name.split("/")[1]]
    return flags if "save" in named else [*flags, "--save", "runs/planned"]


def checkpoint_of(shape: DecoderShape) -> str | None:
    """Name of the checkpoint on the hub with this shape; None if there is none."""
    return next((HUB_NAMES[name] for name, known in SHAPES.items() if known == shape), None)


def placeholders(planner: Planner, arguments: argparse.Namespace) -> list[str]:
    """Notes on the placeholders in the commands that the user must replace."""
    notes = [] if arguments.file else ["ROLLOUTS is the rollout file of the run (or give --prompt-data and a reward)"]
    flags, hub_name = own_flags(planner, arguments), checkpoint_of(planner.shape)
    if "--load-hf" in flags and arguments.hf_config is None:
        folder = flags[flags.index("--load-hf") + 1]
        notes.append(f"{folder} is the folder of `hf download {hub_name} --local-dir {folder}`")
    elif "--load-hf" not in flags and arguments.args_file is None:
        notes.append("without --load-hf or --load the run starts from random weights")
        if planner.shape.mixer is not None:
            kind = planner.shape.mixer.kind
            notes.append(f"flags cannot say the sizes of {kind}: give a config.json of this shape by --hf-checkpoint")
    return notes


def _model_flags(planner: Planner, arguments: argparse.Namespace) -> list[str]:
    shape, step = planner.shape, planner.step
    if arguments.hf_config is not None or checkpoint_of(shape) is not None:
        # The shape comes from the folder's config.json.
        return ["--bf16"]
    names = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size"
    flags = [part for name in names.split() for part in ("--" + name.replace("_", "-"), str(getattr(shape, name)))]
    flags += ["--swiglu", "--disable-bias-linear", "--bf16"]
    flags += ["--norm-epsilon", f"{shape.norm_epsilon:g}", "--rotary-base", f"{shape.rotary_base:.0f}"]
    for name in ("use_rope_scaling", "qk_layernorm", "add_qkv_bias", "untie_embeddings_and_output_weights"):
        if getattr(shape, name):
            flags.append("--" + name.replace("_", "-"))
    if shape.num_experts:
        flags += ["--num-experts", str(shape.num_experts), "--moe-router-topk", str(shape.moe_router_topk)]
        flags += ["--moe-ffn-hidden-size", str(shape.expert_width)]
        if shape.moe_shared_expert_intermediate_size:
            flags += ["--moe-shared-expert-intermediate-size", str(shape.moe_shared_expert_intermediate_size)]
    return [*flags, "--max-position-embeddings", str(max(4096, step.longest))]


def _mesh_flags(planner: Planner, prediction: Prediction) -> list[str]:
    choice, mesh, states = prediction.choice, prediction.choice.mesh, planner.states
    sizes = {
        "--tensor-model-parallel-size": mesh.tensor,
        "--context-parallel-size": mesh.context,
        "--pipeline-model-parallel-size": mesh.pipeline,
        "--num-virtual-stages-per-pipeline-rank": mesh.chunks,
        "--expert-model-parallel-size": mesh.experts,
    }
    flags = [part for flag, size in sizes.items() if size > 1 for part in (flag, str(size))]
    if planner.shape.num_experts and mesh.expert_tensor != mesh.tensor:
        flags += ["--expert-tensor-parallel-size", str(mesh.expert_tensor)]
    if mesh.sequence_parallel:
        flags.append("--sequence-parallel")
    if len(set(mesh.layers)) > 1:
        flags += ["--pipeline-model-parallel-layout", "auto"]
    flags += ["--tree-segment-tokens", str(choice.segment_tokens)]
    if choice.memory_tokens is not None:
        flags += ["--tree-memory-tokens", str(choice.memory_tokens)]
    if choice.activation_tokens is not None:
        flags += ["--tree-activation-tokens", str(choice.activation_tokens)]
    if choice.full_recompute:
        flags += ["--recompute-granularity", "full"]
    if states.kv_offload_fraction:
        flags += ["--kv-offload-fraction", f"{states.kv_offload_fraction:g}"]
    if states.distributed_optimizer:
        flags.append("--use-distributed-optimizer")
    dtypes = {name: getattr(states, name) for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")}
    lower = {name: dtype for name, dtype in dtypes.items() if dtype != "fp32"}
    if lower or states.offload_fraction:
        flags.append("--use-precision-aware-optimizer")
    for name, dtype in lower.items():
        flags += [f"--{name.replace('_', '-')}-dtype", dtype]
    if states.offload_fraction:
        flags += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", f"{states.offload_fraction:g}"]
    return flags


def commands(planner: Planner, prediction: Prediction, arguments: argparse.Namespace) -> list[str]:
    """Commands of a prediction: torchrun on each node, and a Slurm job."""
    flags = shlex.join(train_flags(planner, prediction, arguments))
    cluster = planner.cluster
    per_node = min(cluster.gpus_per_node, cluster.num_gpus)
    nodes = cluster.num_gpus // per_node
    where = (
        f"--nproc-per-node {per_node}"
        if nodes == 1
        else f"--nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500"
    )
    return [
        f"torchrun {where} -m megatron_dta.train {flags}",
        f"slurm/submit.sh train --nodes {nodes} --gpus-per-node {per_node} --exclusive -- {flags}",
    ]
