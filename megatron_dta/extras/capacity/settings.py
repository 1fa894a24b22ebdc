"""Reads the model or all settings of a planned run from a Hugging Face configuration or an argument file of training.

The functions import torch, which takes longer than planning, so they import it only when called.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.common.files import read_json
from megatron_dta.core.shapes.decoder import DecoderShape
from megatron_dta.extras.capacity.memory import StateSettings
from megatron_dta.extras.capacity.meshes import Choice, MeshSizes, make_mesh

if TYPE_CHECKING:
    from megatron_dta.training.config import TrainConfig

SIZES = (1024, 2048, 4096, 8192)

# Help texts of the flags that ``commands.plan_run`` generates from names.
HELP = {
    "max_sequences": "only the first N sequences of FILE",
    "max_length": "only the first N tokens of each sequence of FILE",
    "sequences": "without FILE: number of sequences of a step",
    "unique_tokens": "without FILE: tokens of a step, with shared tokens counted once",
    "longest_path": "without FILE: tokens of the longest sequence",
    "samples_per_prompt": "without FILE: sequences that share a prompt (default: 1)",
    "num_gpus": "number of GPUs of the run, one process each",
    "gpus_per_node": "GPUs that NVLink connects (default: 8)",
    "gpu_memory_gib": "memory of a GPU (default of this and the following flags: by --gpu)",
    "gemm_tflops": "10^12 operations per second of a large bfloat16 product",
    "hbm_gigabytes_per_second": "bandwidth of a GPU's memory",
    "nvlink_gbps": "gigabits per second and direction of a GPU inside a node",
    "network_gbps": "gigabits per second and direction of a GPU between nodes",
    "host_gigabytes_per_second": "bandwidth of the host's memory per GPU, for offloaded states",
    "main_grads_dtype": "dtype of gradients (default: %(default)s)",
    "main_params_dtype": "dtype of master weights (default: %(default)s)",
    "exp_avg_dtype": "dtype of Adam's first moment (default: %(default)s)",
    "exp_avg_sq_dtype": "dtype of Adam's second moment (default: %(default)s)",
    "tree_activation_tokens": "in-flight tokens whose activations are kept (default: as many as fit)",
    "kv_offload_fraction": "share of the layers whose K, V and gradients of the path are on the host (default: 0)",
    "recompute": "kinds to try: of segments (tree) or of layers, by Megatron (full; default: both)",
}


def read_hf_config(path: str) -> DecoderShape:
    """Read the shape of a config.json (or its folder)."""
    from megatron_dta.core.config import ModelConfig
    from megatron_dta.training.huggingface.config.config import model_settings, read_hf_config

    folder = Path(path)
    if folder.is_file() and folder.name != "config.json":
        values = read_json(folder)
    else:
        values = read_hf_config(folder.parent if folder.is_file() else folder)
    return DecoderShape.of(ModelConfig(**model_settings(values, origin=path)))


def states_of_run(config: TrainConfig) -> StateSettings:
    model, optimization = config.model, config.optimization
    return StateSettings(
        weights="bf16" if model.bf16 else "fp32",
        main_grads=optimization.main_grads_dtype,
        main_params=optimization.main_params_dtype,
        exp_avg=optimization.exp_avg_dtype,
        exp_avg_sq=optimization.exp_avg_sq_dtype,
        distributed_optimizer=config.parallel.use_distributed_optimizer,
        offload_fraction=optimization.optimizer_offload_fraction if optimization.optimizer_cpu_offload else 0.0,
        kv_offload_fraction=config.tree.kv_offload_fraction,
        full_recompute=model.recompute_granularity == "full",
    )


def read_args_file(path: str, num_gpus: int) -> tuple[DecoderShape, list[Choice], StateSettings, list[str]]:
    """Read and check an argument file of ``megatron_dta.train`` for ``num_gpus`` processes.

    Returns:
        The model, the choices to evaluate, the states, and the names of the run's settings ("save", "load_hf") that the
        file gives.
    """
    from megatron_dta.core.config.checks.experts import check_experts
    from megatron_dta.core.config.checks.mesh import check_context_parallel, check_tensor_parallel, check_world_size
    from megatron_dta.core.config.derived.pipeline_layout import stage_layers
    from megatron_dta.training.arguments import parse_settings

    if not os.path.isfile(path):
        raise InputError(f"--args-file {path}: there is no such file")
    config = parse_settings([f"@{path}"])
    model, parallel, tree = config.model, config.parallel, config.tree
    check_world_size(parallel, num_gpus)
    check_tensor_parallel(model, parallel)
    check_context_parallel(model, parallel)
    check_experts(model, parallel)
    shape = DecoderShape.of(model)
    mesh = make_mesh(
        shape,
        num_gpus,
        MeshSizes(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.num_virtual_stages_per_pipeline_rank,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_parallel_size,
            parallel.sequence_parallel,
            tuple(stage_layers(model, parallel)),
            parallel.context_parallel_size,
        ),
    )
    full = model.recompute_granularity == "full"
    if model.recompute_granularity == "selective":
        raise InputError(f"{path}: --recompute-granularity selective cannot be planned; give full, or leave it out")
    # If training chooses the segment size by memory, try the sizes that it can choose.
    by_memory = tree.tree_memory_gib is not None or config.leaves_memory_open
    free = [size * parallel.context_parallel_size for size in (SIZES if by_memory else (2048,))]
    sizes = (tree.tree_segment_tokens,) if tree.tree_segment_tokens else tuple(free)
    kept = None if full else tree.tree_activation_tokens
    named = ["save"] * (config.checkpoint.save is not None)
    named += ["load_hf"] * (config.checkpoint.load_hf is not None or config.checkpoint.load is not None)
    choices = [Choice(mesh, size, tree.tree_memory_tokens, kept, full) for size in sizes]
    return shape, choices, states_of_run(config), named
