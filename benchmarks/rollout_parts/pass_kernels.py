"""The part ``pass`` of the rollout benchmark: times captured decoding passes with the kernels that ``decode_layer`` can
switch between, and these kernels alone, each over all layers, so that weights and pages come from memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from common.engine import Setup, check_arguments
from common.profile import profile_step
from dta_kernels.layers.few_rows import Tiles, few_rows_product, gated_product, product_into_stream, tiles_for
from dta_kernels.layers.qkv_rope import MixedQKV
from dta_kernels.layers.qkv_rope_pages import write_to_pages
from dta_kernels.layers.rms_norm import rms_norm_forward
from dta_kernels.paged_attention import mixed_rows
from megatron_dta.common.errors import InputError
from megatron_dta.model.attention.paged_cache import PagedCache
from megatron_dta.model.attention.paged_context import StaticPass, pass_rows, static_tiles
from megatron_dta.model.layers import decode_layer
from megatron_dta.model.layers.fused_autograd_layer import FusedAutogradLayer
from megatron_dta.sampling.engines.in_process.cache_size import head_shape
from megatron_dta.sampling.engines.in_process.next_token import next_tokens
from megatron_dta.sampling.params import SamplingParams

_REPLAYS = 20
_SWITCHES = ("TURNS_IN_ATTENTION", "ADDS_IN_PRODUCTS")


def run_pass(arguments: argparse.Namespace, setup: Setup) -> Iterator[dict[str, Any]]:
    """A row for each number of sequences and each set of kernels: whole passes, then kernels alone."""
    check_arguments(arguments, "cached_tokens")
    if setup.device.type != "cuda":
        raise InputError("pass: this part needs a CUDA GPU")
    for count in arguments.rows:
        case, hidden = _Case(setup, count, arguments.cached_tokens, arguments.block_size), {}
        for name, changes in _kinds(arguments.sweep):
            with _patched(changes):
                yield _measured_pass(case, name, hidden, arguments.profile)
        for name, run in _kernels(case, arguments.sweep):
            yield {"rows": count, "kernels": name, "microseconds": 1e6 * _seconds(run, len(case.layers))}


class _Case:
    """Sequences with random pages, the static pass over them, and inputs of its kernels."""

    def __init__(self, setup: Setup, count: int, cached: int, page_size: int) -> None:
        self.setup, self.model, self.count, self.cached = setup, setup.model.model_chunks[0], count, cached
        self.shape, device = head_shape(setup.model), setup.device
        layers = self.model.decoder.layers
        self.layers = [(layer.layer_number, FusedAutogradLayer(layer)) for layer in layers]
        width = -(-(cached + 1) // page_size)
        self.cache = PagedCache(
            self.model.attention_layers,
            page_size,
            self.shape.num_groups,
            self.shape.head_size,
            self.shape.dtype,
            device,
        )
        self.cache.grow(count * width)
        for pages in (self.cache.keys, self.cache.values):
            for tensor in pages.values():
                tensor.normal_()
        order = np.random.default_rng(0).permutation(count * width)
        self.tables = torch.from_numpy(order).to(device)
        starts, counts = np.full(count, cached - 1), np.ones(count, np.int64)
        self._rows = pass_rows(starts, counts, list(order.reshape(count, width)), page_size)
        self._rows = replace(self._rows, table_begins=np.arange(count) * width)
        self._tiles = static_tiles(starts, counts, self._rows, self.shape.tile_tokens(1))
        C, (G, P, D) = self.model.config.hidden_size, self.layers[0][1].layout

        def random(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=self.shape.dtype)

        self.x, self.heads, self.active = random(count, C), random(count, G * P * D), random(count, self._ffn())
        self.angle = torch.rand(count, D // 2, device=device)

    def _ffn(self) -> int:
        return self.layers[0][1].fc2.shape[1]

    def static(self) -> StaticPass:
        """A pass that is ready to run."""
        static = StaticPass(
            self.count, 1, self.shape, self.cache.page_size, self.tables, self.cache.addresses, self.cache.layer_rows
        )
        words = static.empty_words(1)
        noise = np.random.default_rng(1).random((1, self.count))
        static.pack(words, self._rows.positions[None], self._rows.slots[None], noise, self._tiles[None])
        static.words.copy_(torch.from_numpy(words[0]))
        return static


def _kinds(sweep: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sets of kernels: the switches of ``decode_layer``, and how far attention reads ahead."""
    yield "separate kernels", dict.fromkeys(_SWITCHES, False)
    yield "keys and queries turned in the attention", {"TURNS_IN_ATTENTION": True, "ADDS_IN_PRODUCTS": False}
    yield "norms in the products", {"TURNS_IN_ATTENTION": False, "ADDS_IN_PRODUCTS": True}
    yield "both", dict.fromkeys(_SWITCHES, True)
    for blocks in (1, 4) if sweep else ():
        yield f"both, {blocks} blocks of keys ahead", {**dict.fromkeys(_SWITCHES, True), "_AHEAD": blocks}


def _patched(changes: dict[str, Any]) -> ExitStack:
    stack = ExitStack()
    for name, value in changes.items():
        stack.enter_context(mock.patch.object(decode_layer if name in _SWITCHES else mixed_rows, name, value))
    return stack


def _measured_pass(case: _Case, name: str, hidden: dict[str, Tensor], profile: bool) -> dict[str, Any]:
    """Milliseconds of a pass with the draw of its tokens and without, and how far its hidden states are from those of
    the first set of kernels."""
    static, model = case.static(), case.model
    params = SamplingParams(1, eos_id=-1)

    def layers() -> Tensor:
        return model(static.input_ids, static.context)

    def whole() -> None:
        next_tokens(model, layers(), static.noise, params, kernels=True)

    hidden[name] = layers().float()
    first = next(iter(hidden.values()))
    again = layers().float()
    row = {"rows": case.count, "kernels": name, "pass_ms": 1e3 * _seconds(whole, 1)}
    row |= {"pass_without_draw_ms": 1e3 * _seconds(layers, 1), "repeats": torch.equal(again, hidden[name])}
    row["difference"] = float((hidden[name] - first).norm() / first.norm())
    # Without the token embedding, every weight once; of every sequence all cached positions.
    bound = case.setup.bound_seconds(case.count * case.cached)
    row["share_of_memory_bound"] = 1e3 * bound / row["pass_ms"]
    if profile:
        graph = _graph(whole)
        row["profile"] = profile_step(lambda: [graph.replay() for _ in range(5)], 14)
    return row


def _kernels(case: _Case, sweep: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of kernels, and a function that runs them for every layer."""
    own, (G, P, D) = case.layers[0][1], case.layers[0][1].layout
    query, context = case.x.new_empty(case.count, G * P, D), case.static().context
    mixed = torch.mm(case.x, own.qkv.t())
    tiles = [tiles_for(case.x, w, gated) for w, gated in ((own.qkv, 0), (own.proj, 0), (own.fc1, 1), (own.fc2, 0))]
    by_tiles = None not in tiles
    if by_tiles:
        mixed = few_rows_product(case.x, own.qkv, tiles[0])

    def rows_of(layer: FusedAutogradLayer) -> MixedQKV:
        norms = layer.head_norms or (None, None)
        return MixedQKV(mixed, case.angle.cos(), case.angle.sin(), *norms, layer.layout, layer.head_eps)

    inputs = [(number, layer, rows_of(layer)) for number, layer in case.layers]

    def separate() -> None:
        for number, layer, rows in inputs:
            write_to_pages(rows, query, context.pages_of(number), context.slots)
            context.attend_written(number, query, layer.scale)

    def attend() -> None:
        for number, layer, rows in inputs:
            context.attend_mixed(number, rows, case.x, layer.scale)

    yield "queries and pages, attention", separate
    yield "attention of mixed rows", attend
    base = context.launches[0][1]
    for keys, stages, warps in ((64, 3, 2), (64, 2, 4), (128, 2, 4), (32, 3, 2), (32, 4, 1)) if sweep else ():
        config = replace(base, keys=keys, num_stages=stages, num_warps=warps)
        context.launches = [(context.launches[0][0], config)]
        yield f"attention of mixed rows, {asdict(config)}", attend
    context.launches = [(context.launches[0][0], base)]
    if by_tiles:
        yield from _product_kernels(case, tiles, sweep)


def _product_kernels(case: _Case, tiles: list[Tiles], sweep: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    counters = torch.zeros(case.x.shape[1], dtype=torch.int32, device=case.x.device)
    layers = [layer for _, layer in case.layers]
    norm, eps = layers[0].norms[0], layers[0].eps[0]
    _, weighted = product_into_stream(case.heads, layers[0].proj, case.x, norm, tiles[1], counters)

    for name, x, chosen in (("proj", case.heads, tiles[1]), ("fc2", case.active, tiles[3])):

        def separate(name: str = name, x: Tensor = x, chosen: Tiles = chosen) -> None:
            for layer in layers:
                terms = few_rows_product(x, getattr(layer, name), chosen)
                rms_norm_forward(case.x, norm, eps, terms, overlap=True)

        yield f"{name}, norm", separate
        others = [Tiles(64, 64, 4, 5), Tiles(64, 128, 4, 3), Tiles(32, 128, 2, 4), Tiles(64, 128, 2, 5)]
        for tried in [chosen, *(others if sweep else ())]:

            def into_stream(name: str = name, x: Tensor = x, tried: Tiles = tried) -> None:
                for layer in layers:
                    product_into_stream(x, getattr(layer, name), case.x, norm, tried, counters)

            yield f"{name} into the stream, {tuple(tried)}", into_stream
    for x in (case.x, weighted):

        def qkv(x: Any = x) -> None:
            for layer in layers:
                few_rows_product(x, layer.qkv, tiles[0], eps)

        def gated(x: Any = x) -> None:
            for layer in layers:
                gated_product(x, layer.fc1, tiles[2], eps)

        yield f"qkv of {type(x).__name__}", qkv
        yield f"gated of {type(x).__name__}", gated
    for tried in (
        (Tiles(32, 64, 1, 4), Tiles(32, 128, 1, 3), Tiles(16, 128, 1, 3), Tiles(64, 64, 1, 4)) if sweep else ()
    ):

        def gated_again(tried: Tiles = tried) -> None:
            for layer in layers:
                gated_product(weighted, layer.fc1, tried, eps)

        yield f"gated of WeightedRows, {tuple(tried)}", gated_again


def _graph(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of ``repeats`` repetitions in ``run``, captured; the least of three measurements."""
    graph, found = _graph(run), []
    graph.replay()
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1e3 / _REPLAYS / repeats)
    return min(found)
