"""How the batch's prefix forest is cut into segments and what of it is kept in memory."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.config.options import option


@dataclass
class TreeConfig:
    """Settings of planning and of the tree engine; none of them changes the result beyond rounding."""

    tree_mode: str = option(
        "dta",
        "dta: depth-first with one path in flight; packed: whole trees within the token capacity; dense: no sharing.",
        choices=("dta", "packed", "dense"),
    )
    tree_segment_tokens: int | None = option(
        None,
        "Most tokens of a segment, the unit of one forward and one backward; pipelines choose smaller ones (default: "
        "the fastest size with --cost-model or --tree-memory-gib, else 2048).",
        minimum=1,
    )
    tree_memory_tokens: int | None = option(
        None,
        "Budget of in-flight tokens (default: the larger of 1.5 x the longest sequence and 8 segments).",
        minimum=1,
    )
    tree_activation_tokens: int | None = option(
        None,
        "In-flight tokens whose activations are kept; the rest is recomputed, but for what runs backward at once "
        "(default: keep all).",
        minimum=0,
    )
    tree_memory_gib: float | None = option(
        None,
        "GiB of GPU memory that each process may use for tensors: weights, gradients and optimizer states (of critic "
        "and reference too), K and V and their gradients, activations, logits and workspace: the most that PyTorch has "
        "allocated at once stays at or under it. The CUDA context, NCCL and fragments that the allocator keeps in "
        "reserve come on top. The planner then chooses how many tokens are in flight and which "
        "segments keep their activations, so it takes the place of --tree-memory-tokens and --tree-activation-tokens.",
        above=0,
    )
    cost_model: str | None = option(
        None,
        "File of tools/fit_cost_model.py for this model's shape, dtype and tensor parallelism: measured seconds and "
        "bytes, by which work is planned (default: counts of operations and of tensors).",
    )
    tree_attention_impl: str = option(
        "auto",
        "triton: kernels for CUDA GPUs, any head size up to 256, float32, bfloat16 and float16; reference: plain "
        "PyTorch; auto: triton on a CUDA GPU for what it takes (not float64), else reference.",
        choices=("auto", "triton", "reference"),
    )
    logprob_chunk_tokens: int | None = option(
        None, "Rows of logits that exist at once (default: 256 MiB of them on a GPU, 16 MiB on a CPU).", minimum=1
    )
