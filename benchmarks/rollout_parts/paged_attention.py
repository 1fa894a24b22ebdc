"""The part ``attention`` of the rollout benchmark: times the decoding kernel alone, with its own settings and others.

The bound is the time to read every cached key and value once. The best settings belong into ``paged_config``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import numpy as np
import torch

from common.bandwidth import measured_bandwidth
from common.engine import MODELS, Setup, check_arguments
from dta_kernels.paged_attention.launch import PagedConfig, Parts, paged_attention, paged_config, tiles_of
from megatron_dta.core.common.errors import InputError

_REPEATS = 20


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``attention``."""
    parser.add_argument("--cached-tokens", type=int, default=640, help="cached tokens of each of the --batch sequences")
    parser.add_argument("--draft-tokens", type=int, default=0, help="additional tokens of each sequence in the pass")
    parser.add_argument("--sweep", action="store_true", help="try other settings, too")


def run_attention(arguments: argparse.Namespace, setup: Setup | None) -> list[dict[str, Any]]:
    """One row for each of the settings: microseconds of a layer, and its share of the memory bound."""
    check_arguments(arguments, "cached_tokens")
    if not torch.cuda.is_available():
        raise InputError("attention: this part needs a CUDA GPU")
    if arguments.draft_tokens < 0:
        raise InputError(f"--draft-tokens must be at least 0, not {arguments.draft_tokens}")
    device, shape = torch.device("cuda"), MODELS[arguments.shape]
    dtype = torch.float32 if arguments.dtype == "fp32" else torch.bfloat16
    bandwidth = arguments.memory_bandwidth_gbs * 1e9 if arguments.memory_bandwidth_gbs else measured_bandwidth(device)
    H, G, D = shape.num_attention_heads, shape.num_query_groups, shape.kv_channels
    default = paged_config(H // G, D, dtype, arguments.draft_tokens + 1, arguments.batch * G)
    rows = []
    for config in [default, *(_others(default) if arguments.sweep else [])]:
        seconds = _seconds(arguments, config, (H, G, D), dtype, device)
        rows.append({
            "part": "attention", **asdict(config), "microseconds": 1e6 * seconds,
            "share_of_memory_bound": _bytes(arguments, (H, G, D), dtype) / bandwidth / seconds,
        })  # fmt: skip
    return rows


def _others(default: PagedConfig) -> list[PagedConfig]:
    settings = product((16, 32, 64, 128), (2, 3, 4), (1, 2, 4), (128, 256, 512))
    configs = [
        replace(default, keys=keys, num_stages=stages, num_warps=warps, min_part=max(keys, min_part))
        for keys, stages, warps, min_part in settings
        if keys * stages <= 256
    ]
    return [config for config in configs if config != default]


def _bytes(arguments: argparse.Namespace, heads: tuple[int, int, int], dtype: torch.dtype) -> int:
    return arguments.batch * arguments.cached_tokens * 2 * heads[1] * heads[2] * dtype.itemsize


def _seconds(
    arguments: argparse.Namespace,
    config: PagedConfig,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Seconds of one launch with its merge, without the launch overhead."""
    H, G, D = heads
    size, count = arguments.block_size, arguments.draft_tokens + 1
    width = -(-arguments.cached_tokens // size)
    num_pages = arguments.batch * width
    pages = [torch.randn(num_pages, size, G, D, dtype=dtype, device=device) for _ in range(2)]
    addresses = torch.tensor([tensor.data_ptr() for tensor in pages], device=device)
    order = np.random.default_rng(arguments.seed).permutation(num_pages)
    tables = torch.from_numpy(order).to(device)
    counts = np.full(arguments.batch, count)
    starts = np.full(arguments.batch, max(0, arguments.cached_tokens - count))
    tiles = tiles_of(starts, counts, np.arange(arguments.batch) * width, 0, config.tokens_of(H // G))
    tiles = torch.from_numpy(tiles).to(device)
    query = torch.randn(arguments.batch * count, H, D, dtype=dtype, device=device)
    out, parts = torch.empty_like(query), Parts()

    def run() -> None:
        paged_attention(query, out, addresses, G, size, tiles, tables, D**-0.5, config, parts)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            run()
    seconds = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / _REPEATS)
    return min(seconds)
