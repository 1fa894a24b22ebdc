"""Rejects sizes of the mesh that divide neither the processes nor the model."""

from __future__ import annotations

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.core.config.parallel import ParallelConfig
from megatron_dta.core.shapes.decoder import context_refusal


def check_world_size(parallel: ParallelConfig, world_size: int) -> None:
    """Reject a number of processes that the sizes of the mesh do not divide."""
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context = parallel.context_parallel_size
    if world_size % (tensor * context * pipeline):
        sizes = (
            ("--tensor-model-parallel-size", tensor),
            ("--context-parallel-size", context),
            ("--pipeline-model-parallel-size", pipeline),
        )
        flags = " x ".join(f"{flag} {size}" for flag, size in sizes if size > 1)
        raise InputError(
            f"{flags} does not divide the {world_size} processes; start a multiple of {tensor * context * pipeline} "
            "(torchrun --nproc-per-node) or change the flags"
        )
    experts, expert_tensor = parallel.expert_model_parallel_size, parallel.expert_tensor_size
    if world_size % (experts * expert_tensor * pipeline):
        raise InputError(
            f"--expert-model-parallel-size {experts} x --expert-tensor-parallel-size {expert_tensor} does not divide "
            f"the {world_size // pipeline} processes of a pipeline stage; start a multiple of "
            f"{experts * expert_tensor * pipeline} in all or change the flags"
        )


def check_tensor_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Reject a model that cannot be divided equally over the ranks of a tensor group."""
    size = parallel.tensor_model_parallel_size
    for flag, value in (
        ("--num-query-groups", model.num_query_groups),
        ("--num-attention-heads", model.num_attention_heads),
        ("--ffn-hidden-size", model.ffn_hidden_size),
    ):
        if value % size:
            raise InputError(
                f"--tensor-model-parallel-size {size} does not divide {flag} {value}; lower it to a divisor of {value}"
            )


def check_context_parallel(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Reject a model whose heads cannot be divided equally over tensor and context ranks."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    refusal = context_refusal(tensor, context, model.num_attention_heads, model.num_query_groups)
    if refusal is not None:
        raise InputError(refusal)
