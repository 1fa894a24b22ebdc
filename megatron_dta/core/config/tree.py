"""Settings of how the prefix forest of a batch is cut into segments and how much memory it may use."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dta.core.config.options import NO_FLAG, option


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
        "Maximum number of tokens in a segment, the unit of one forward and one backward; pipelines choose smaller "
        "segments (default: the fastest size on a GPU and with --tree-memory-gib; 2048 on a CPU).",
        minimum=1,
    )
    tree_memory_tokens: int | None = option(
        None,
        "Maximum number of tokens in flight (default: the larger of 1.5 x the longest sequence and 8 segments).",
        minimum=1,
        needs="tree_mode!=packed",
    )
    tree_activation_tokens: int | None = option(
        None,
        "In-flight tokens whose activations are kept. The others are recomputed, except where the backward follows at"
        " once (default: keep all).",
        minimum=0,
    )
    tree_memory_gib: float | None = option(
        None,
        "GPU memory in GiB that each process may use for tensors: weights, gradients and optimizer states (including "
        "critic and reference model), K and V and their gradients, activations, logits and workspace. PyTorch's peak "
        "of allocated memory stays at or below this limit; the CUDA context, NCCL and memory that the allocator keeps"
        " in reserve come on top. The planner chooses how many tokens are in flight and which segments keep their "
        "activations, so this flag replaces --tree-memory-tokens and --tree-activation-tokens (default: what a GPU "
        "has, measured before every step, unless one of those flags or --recompute-granularity is given).",
        above=0,
    )
    kv_offload_fraction: float = option(
        0.0,
        "Share of the layers whose keys, values and gradient accumulators of the path in flight are in pinned host "
        "memory, copied to the GPU and back while other layers compute. It makes longer paths fit and changes no bit "
        "of the result; segments must be long enough for computation to hide the copies.",
        minimum=0,
        maximum=1,
    )
    tree_attention_impl: str = option(
        "auto",
        "triton: kernels for CUDA GPUs, with head sizes up to 256 in float32, bfloat16 and float16; reference: plain "
        "PyTorch; auto: triton on a CUDA GPU where it is supported (not for float64), else reference.",
        choices=("auto", "triton", "reference"),
        flag=NO_FLAG,
    )
    logprob_chunk_tokens: int | None = option(
        None,
        "Maximum rows of logits in memory at once (default: 256 MiB of them on a GPU, 16 MiB on a CPU).",
        minimum=1,
        flag=NO_FLAG,
    )
