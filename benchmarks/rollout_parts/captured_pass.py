"""The part ``pass`` of the rollout benchmark: times a captured decoding pass alone, without the engine around it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.engine import Setup, check_arguments
from common.profile import profile_step
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import StaticPass, pass_rows, static_tiles
from megatron_dta.sampling.in_process.cache_size import head_shape
from megatron_dta.sampling.in_process.next_token import next_tokens
from megatron_dta.sampling.params import SamplingParams

_REPLAYS = 20


def run_pass(arguments: argparse.Namespace, setup: Setup) -> Iterator[dict[str, Any]]:
    """A row for each number of sequences."""
    check_arguments(arguments, "cached_tokens")
    if arguments.draft_tokens < 0:
        raise InputError(f"--draft-tokens must be at least 0, not {arguments.draft_tokens}")
    if setup.device.type != "cuda":
        raise InputError("pass: this part needs a CUDA GPU")
    for count in arguments.rows:
        case = _Case(setup, count, arguments.cached_tokens, arguments.draft_tokens, arguments.block_size)
        yield _measured(case, arguments.profile)


class _Case:
    """Sequences with random pages, each with a token and its draft, and the static pass over them."""

    def __init__(self, setup: Setup, count: int, cached: int, drafted: int, page_size: int) -> None:
        self.setup, self.model, self.count, self.cached = setup, setup.model.model_chunks[0], count, cached
        self.num_tokens, self._run = count * (1 + drafted), 16 if drafted else 1  # as ``DecodeSteps`` chooses
        self.shape, device = head_shape(setup.model), setup.device
        width = -(-(cached + drafted) // page_size)
        self.cache = PagedCache(
            self.model.attention_layers,
            page_size,
            self.shape.num_groups,
            self.shape.sizes,
            self.shape.dtype,
            device,
        )
        self.cache.grow(count * width)
        for pages in (self.cache.keys, self.cache.values):
            for tensor in pages.values():
                tensor.normal_()
        order = np.random.default_rng(0).permutation(count * width)
        self.tables = torch.from_numpy(order).to(device)
        starts, counts = np.full(count, cached - 1), np.full(count, 1 + drafted)
        self._rows = pass_rows(starts, counts, list(order.reshape(count, width)), page_size)
        self._rows = replace(self._rows, table_begins=np.arange(count) * width)
        self._tiles = static_tiles(starts, counts, self._rows, self.shape.tile_tokens(self._run))

    def static(self) -> StaticPass:
        """A pass that is ready to run."""
        static = StaticPass(
            self.num_tokens, self._run, self.shape, self.cache.page_size, self.tables, self.cache.addresses,
            self.cache.layer_rows,
        )  # fmt: skip
        words = static.empty_words(1)
        noise = np.random.default_rng(1).random((1, self.num_tokens))
        static.pack(words, self._rows.positions[None], self._rows.slots[None], noise, self._tiles[None])
        static.words.copy_(torch.from_numpy(words[0]))
        return static


def _measured(case: _Case, profile: bool) -> dict[str, Any]:
    """Milliseconds of a pass with the draw of its tokens and without, and whether a repeat has the same bits."""
    static, model = case.static(), case.model
    params = SamplingParams(1, eos_id=-1)

    def layers() -> Tensor:
        return model(static.input_ids, static.context)

    def whole() -> None:
        next_tokens(model, layers(), static.noise, params, kernels=True)

    first = layers().clone()
    row = {"rows": case.count, "repeats": torch.equal(layers(), first)}
    row |= {"pass_ms": 1e3 * _seconds(whole), "pass_without_draw_ms": 1e3 * _seconds(layers)}
    # Without the token embedding, every weight once; of every sequence all cached positions.
    bound = case.setup.bound_seconds(case.count * case.cached)
    row["share_of_memory_bound"] = 1e3 * bound / row["pass_ms"]
    if profile:
        graph = _graph(whole)
        row["profile"] = profile_step(lambda: [graph.replay() for _ in range(5)], 14)
    return row


def _graph(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _seconds(run: Callable[[], Any]) -> float:
    """Seconds of ``run``, captured; the least of three measurements."""
    graph, times = _graph(run), []
    graph.replay()
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _REPLAYS)
    return min(times)
