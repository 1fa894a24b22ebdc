"""The settings of the in-process engine."""

from __future__ import annotations

from dataclasses import dataclass

FEW_REQUESTS = 256


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engine. None of them changes the samples but ``stop_degenerate``.

    Attributes:
        max_requests: maximum number of running requests. None: those that surely fit into the cache, but at least
            ``FEW_REQUESTS`` and at most 4,096 (see ``--inference-max-requests``).
        block_size: positions in a page.
        buffer_size_gb: size of the cache in GiB on each rank. None: see ``cache_size`` on a GPU, else no limit.
        max_tokens: maximum number of tokens in a forward pass; longer prompts are split over passes.
        stop_degenerate: end requests that have degenerated into a loop or noise as if their length were reached.
        attention_impl: see ``TreeConfig``.
        static_passes: decode with tensors at fixed addresses, in CUDA graphs on a GPU, where
            ``cuda_graphs.why_not_captured`` allows it.
        burst: with ``static_passes``, maximum number of passes between two reads of tokens; 1: one pass at a time.
    """

    max_requests: int | None = None
    block_size: int = 16
    buffer_size_gb: float | None = None
    max_tokens: int = 4096
    stop_degenerate: bool = False
    attention_impl: str = "auto"
    static_passes: bool = False
    burst: int = 8
