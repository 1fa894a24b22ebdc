"""Runs decoding passes and their sampling on tensors at fixed addresses, as CUDA graphs on a GPU.

A pass of a small batch consists of hundreds of short kernels, which a CPU launches more slowly than a GPU runs them.
Here a pass, including the draw of its tokens, is captured for a few sizes (``bucket``). What differs between passes
(tokens, positions, page tables, noise, the address of the cache) is read from memory. The weights are those of the
trainer, which updates them in place; if one of them moves, all graphs are captured again. Passes over latents read the
cache itself (``static_latents``), so they are captured again when it grows.

A *burst* is several passes of the same rows. Each pass takes its tokens from the previous one on the device and
everything else is known in advance, so the host waits once for all of them. It detects ends of sequences afterwards and
drops the tokens that a row computed beyond its end. A burst may also take its first tokens from the burst before it
(``bursts``).

The ranks of a tensor group plan the same passes, so they capture the same sizes in the same order. The sums over the
group and the exchange of its draws are captured with the rest. With layers of experts the numbers of tokens stay on
the device (``dta_kernels.experts.grouped_products``), so one graph serves all choices of experts.

With pipeline stages each rank captures its own model chunks, and ``pipelined_steps`` runs several groups of rows
through them.

On a CPU the same passes run without a capture, for tests in Triton's interpreter.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_dta.common.keyed_random import keyed_uniform
from megatron_dta.core.model.attention.segment_attention import choose_attention
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import HeadShape, PassRows, StaticPass, pass_rows, static_tiles
from megatron_dta.core.model.decode.static_latents import StaticLatents
from megatron_dta.core.model.hybrid.decode_states import DecodeStates, SteppedStates
from megatron_dta.core.model.kernel_types import upload
from megatron_dta.core.model.parallel.mesh import current_mesh
from megatron_dta.core.model.parallel.staged_model import Model, StagedModel
from megatron_dta.core.model.tree_model import TreeGPTModel
from megatron_dta.sampling.in_process.drafting import LEAST_TOKENS
from megatron_dta.sampling.in_process.next_token import next_tokens
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.scheduler import Pass
from megatron_dta.sampling.params import SamplingParams

MOST_TOKENS = 4096
"""Maximum number of tokens in a pass, and of requests that run at once if no number is given."""

_MOST_GRAPHS = 128
# The logits of all of them are computed.
_MOST_PROMPT_TOKENS = 256


def bucket(count: int) -> int:
    """The captured size for ``count`` rows: powers of two and the values halfway between, then multiples of 128, and
    above 1,024 of 256."""
    if count > 256:
        step = 128 if count <= 1024 else 256
        return -(-count // step) * step
    power = 1 << (count - 1).bit_length()
    return power // 4 * 3 if power >= 32 and count <= power // 4 * 3 else power


def why_not_captured(model: Model, attention_impl: str = "auto") -> str | None:
    """Why decoding with ``model`` and ``tree_attention_impl`` cannot be captured; None if it can.

    The stages of a pipeline must all call this, since one of them decides for all.
    """
    reason = _why_not_on_this_rank(model, attention_impl)
    if not isinstance(model, StagedModel):
        return reason
    return next(filter(None, current_mesh().gather_over_replica(reason)), None)


def _why_not_on_this_rank(model: Model, attention_impl: str) -> str | None:
    config, parameter = model.config, next(model.parameters())
    if config.sequence_parallel and not model.decodes_directly:
        return (
            "cannot capture layers made of modules with --sequence-parallel, for which Megatron switches random states "
            "on the host (adapters, latent attention, LayerNorm, fused_layer_impl reference, a stage without layers)"
        )
    if config.num_moe_experts is not None:
        if config.expert_model_parallel_size > 1 or config.tensor_model_parallel_size > 1:
            return (
                "cannot capture experts on several ranks, whose exchange of tokens needs their numbers on the host "
                "(--expert-model-parallel-size or --tensor-model-parallel-size above 1 with --num-experts)"
            )
        if model.counts_on_host:
            return "cannot capture experts whose numbers of tokens the host has to know"
    if getattr(config, "fp8", None):
        return "cannot capture products in FP8, whose scales change from pass to pass (--fp8-format)"
    if parameter.device.type != "cuda":
        return "needs a CUDA GPU"
    if not choose_attention(attention_impl, config.kv_channels, parameter.dtype, parameter.device):
        return "needs attention kernels, which tree_attention_impl or the dtype rules out"
    return None


def noise_of(
    rows: Sequence[Request],
    drafts: Sequence[np.ndarray],
    params: SamplingParams,
    iteration: int,
    steps: int = 1,
    ahead: np.ndarray | int = 0,
) -> np.ndarray:
    """Uniform numbers for each row's next position, or the one ``ahead`` of it, and those after its drafted tokens, row
    by row, for ``steps`` consecutive passes: float64 [steps, n]."""
    widths = np.array([len(draft) + 1 for draft in drafts])
    keys = np.repeat(np.array([sequence.generation.key for sequence in rows], dtype=np.int64), widths)
    num_tokens = np.array([sequence.num_tokens for sequence in rows], dtype=np.int64) + ahead
    positions = np.repeat(num_tokens - np.cumsum(widths) + widths, widths) + np.arange(widths.sum())
    positions = positions + np.arange(steps)[:, None]
    return keyed_uniform(params.seed, params.domain, iteration, keys, positions)


@dataclass(frozen=True)
class Burst:
    """One or several passes of the same rows.

    Attributes:
        token_ids: int64 [n], the inputs of the first pass, row by row, but those of the rows that ``follows`` names.
        starts: int64 [rows], computed positions of each row.
        counts: int64 [rows], tokens of each row in a pass; 1 if there are several passes.
        tables: page tables with room for all passes.
        steps: int64 [rows], the number of passes, from the first one on, in which each row takes part.
        noise: float64 [passes, n], in [0, 1).
        states: the states that the rows continue, and each row's slot, int64 [rows]; None for a model without states.
        follows: the burst before this one, if the host does not know its tokens, and which of its rows are the first
            rows of this one, int64.
    """

    token_ids: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tables: list[np.ndarray]
    steps: np.ndarray
    noise: np.ndarray
    states: tuple[DecodeStates, np.ndarray] | None = None
    follows: tuple[RunningBurst, np.ndarray] | None = None


class RunningBurst:
    """The draws of a launched burst, after each token of each pass.

    Attributes:
        drawn: float64 [passes, 2, at least n] on the device, tokens and their logprobs; entries of rows that have left
            the burst are undefined. A float64 represents every token id exactly.
    """

    def __init__(self, drawn: Tensor, num_tokens: int) -> None:
        self.drawn, self._num_tokens, self._copied = drawn, num_tokens, None
        self._on_host = drawn
        if drawn.is_cuda:
            self._on_host = torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True)
            self._on_host.copy_(drawn, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, int32 [passes, n], and logprobs, float64 [passes, n]. Waits for the passes, not for later ones."""
        if self._copied is not None:
            self._copied.synchronize()
        drawn = self._on_host.numpy()[:, :, : self._num_tokens]
        return drawn[:, 0].astype(np.int32), drawn[:, 1]


@dataclass(frozen=True)
class CapturedPass:
    """A pass of one model chunk.

    Attributes:
        static: its inputs; on a stage after the first, ``hidden`` takes the place of its token ids.
        hidden: the hidden states that the previous stage sends; None on the first stage.
        run: runs the pass. Returns the hidden states for the next stage. On the last stage, it returns tokens and their
            logprobs, float64 [2, tokens], and writes the tokens into ``static.input_ids``. The next run overwrites the
            result.
    """

    static: StaticPass
    hidden: Tensor | None
    run: Callable[[], Tensor]


class DecodeSteps:
    """Runs bursts of ``model``.

    Args:
        shape: attention heads of this rank.
        page_size: positions in a page of the cache.
        max_rows: maximum number of rows in a pass.

    Attributes:
        captures: number of passes captured so far; a capture takes the time of several eager passes.
        most_tokens: maximum number of tokens in a pass: those of a token for each row, at least 1,024.
        runs_ahead: whether bursts may follow others.
    """

    runs_ahead = True

    def __init__(self, model: Model, shape: HeadShape, page_size: int, max_rows: int) -> None:
        self._model, self._shape, self._page_size = model, shape, page_size
        self.most_tokens = min(MOST_TOKENS, max(1024, max_rows))
        device = next(model.parameters()).device
        self._tables = torch.zeros(
            max_rows * -(-model.max_sequence_length // page_size), dtype=torch.int64, device=device
        )
        rows = {number: row for row, number in enumerate(model.attention_layers)}
        self._layer_rows = rows
        self._addresses = torch.zeros(len(rows), 2, dtype=torch.int64, device=device)
        recurrent = [number for part in model.model_chunks for number in part.recurrent_layers]
        self._state_rows = {number: row for row, number in enumerate(recurrent)}
        self._state_addresses = torch.zeros(len(recurrent), 2, dtype=torch.int64, device=device)
        self._addresses_of: Tensor | None = None
        self._cache: PagedCache | None = None
        self._passes: dict[tuple, CapturedPass] = {}
        self._weights: tuple[int, ...] = ()
        self._pool: object = None
        self.captures = 0

    def start(self) -> None:
        """Begin a phase of sampling; drops all graphs if a weight has moved."""
        weights = tuple(tensor.data_ptr() for tensor in (*self._model.parameters(), *self._model.buffers()))
        # The ranks of a replica capture together, because a capture begins with a pass of a tensor group.
        if any(current_mesh().gather_over_replica(weights != self._weights)):
            self._drop_passes()
            self._weights = weights

    def _drop_passes(self) -> None:
        """Drop all graphs, and their memory pool: PyTorch refuses to capture into one whose graphs are all gone."""
        self._passes.clear()
        self._pool = None

    def takes(self, plan: Pass) -> bool:
        """Whether ``plan`` is run here: all rows get tokens, after short parts of prompts at most."""
        tokens, rows = sum(plan.counts), len(plan.rows)
        return len(plan.ready) == rows > 0 and tokens <= min(self.most_tokens, rows + _MOST_PROMPT_TOKENS)

    def launch(self, cache: PagedCache, burst: Burst, params: SamplingParams) -> RunningBurst:
        """Launch the passes of a burst; does not wait for the device."""
        self._read(cache, burst)
        num_steps, n = burst.noise.shape
        captured = self._captured(burst, params)
        static = captured.static
        if num_steps == 1 and burst.follows is None:
            return RunningBurst(self._run_one(burst, captured), n)
        words, tables = self._inputs(burst, static)
        last, columns = burst.follows or (None, np.zeros(0, np.int64))
        arrays = [columns, burst.token_ids, words, tables]
        columns, tokens, words_on_device, tables = upload(arrays, self._tables.device)
        if last is not None:
            tokens = torch.cat([last.drawn[-1, 0].index_select(0, columns).long(), tokens])
        static.input_ids[0, :n].copy_(tokens)
        self._tables[: len(tables)].copy_(tables)
        drawn = static.noise.new_empty(num_steps, 2, static.num_tokens)
        for step_words, of_step in zip(words_on_device.view(num_steps, -1), drawn, strict=True):
            static.words.copy_(step_words)
            of_step.copy_(captured.run())
        return RunningBurst(drawn, n)

    def _run_one(self, burst: Burst, captured: CapturedPass) -> Tensor:
        """Launch one pass in few calls, because the device waits for them. Returns its draws."""
        static, device, first = captured.static, self._tables.device, len(captured.static.words)
        rows, size = pass_rows(burst.starts, burst.counts, burst.tables, self._page_size), len(static.empty)
        packed = torch.empty(size + len(rows.tables), dtype=torch.int64, pin_memory=device.type == "cuda")
        on_host = packed.numpy()
        on_host[:size], on_host[size:] = static.empty, rows.tables
        on_host[first : first + len(burst.token_ids)] = burst.token_ids
        _fill(static, on_host[None], burst, rows, self._shape.tile_tokens(self._run_of(burst)))
        static.inputs.copy_(packed[:size], non_blocking=True)
        self._tables[: len(rows.tables)].copy_(packed[size:], non_blocking=True)
        return captured.run()[None]

    def _read(self, cache: PagedCache, burst: Burst) -> None:
        """Let the passes read ``cache`` and the states of ``burst``."""
        if burst.states is not None:
            self._state_addresses.copy_(burst.states[0].addresses)
        if self._addresses_of is not cache.addresses:
            if not self._shape.has_kernels:
                if cache.device.type == "cuda":
                    torch.cuda.synchronize()  # the last burst may still run
                self._drop_passes()
                # The engine alone decides how long there is one.
                self._cache = weakref.proxy(cache)
            self._addresses.copy_(cache.addresses)
            self._addresses_of = cache.addresses

    def _inputs(self, burst: Burst, static: StaticPass, tables_before: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """The words of ``static`` in each pass of the burst, and the page tables that are read from position
        ``tables_before`` of all tables on."""
        words = static.empty_words(len(burst.noise))
        rows = pass_rows(burst.starts, burst.counts + burst.steps - 1, burst.tables, self._page_size)
        rows = replace(rows, table_begins=rows.table_begins + tables_before)
        _fill(static, words, burst, rows, self._shape.tile_tokens(self._run_of(burst)))
        return words, rows.tables

    @staticmethod
    def _run_of(burst: Burst) -> int:
        """Tokens of a row for which the attention is configured; one value for drafts of all lengths."""
        return 1 if burst.noise.shape[1] == len(burst.counts) else 16

    def _captured(self, burst: Burst, params: SamplingParams, chunk: int = 0) -> CapturedPass:
        """The pass of the rank's model chunk ``chunk`` for ``burst``."""
        num_tokens, run = bucket(burst.noise.shape[1]), self._run_of(burst)
        if run > 1 and num_tokens < 256:  # reading the weights is what takes time, and every size is a capture
            num_tokens = max(LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())
        # There are at most as many tiles as tokens, and empty tiles cost less than captures for each number of tiles.
        width = 0 if self._shape.has_kernels else self._width(burst)
        key = (num_tokens, run, width, params.temperature, params.top_p, params.vocab_size, chunk)
        if key not in self._passes:
            while len(self._passes) >= _MOST_GRAPHS:
                del self._passes[next(iter(self._passes))]
            static = self._static(num_tokens, run, width)
            if self._state_rows:
                arrays = self._state_addresses, self._state_rows, static.state_slots, static.context.position_ids
                static.context.path_states = SteppedStates(*arrays)
            self.captures += 1
            model, hidden = self._model.model_chunks[chunk], None
            if not model.pre_process:
                hidden = torch.zeros(model.stage_shape(num_tokens), dtype=self._shape.dtype, device=self._tables.device)
            run_pass = self._capture(lambda: _pass(model, static, hidden, params))
            self._passes[key] = CapturedPass(static, hidden, run_pass)
        return self._passes[key]

    def _width(self, burst: Burst) -> int:
        """Pages of each row of latents: the longest row's, to the next of four to eight steps up to a power of two."""
        pages = -(-int((burst.starts + burst.counts + burst.steps - 1).max()) // self._page_size)
        step = max(4, (1 << (pages - 1).bit_length()) // 8)
        return -(-pages // step) * step

    def _static(self, num_tokens: int, run: int, width: int) -> StaticPass:
        """Inputs of a pass, see ``StaticPass``; ``width`` is that of ``StaticLatents``, or 0."""
        if width:
            return StaticLatents(num_tokens, self._cache, self._tables, width)
        memory = self._page_size, self._tables, self._addresses, self._layer_rows
        return StaticPass(num_tokens, run, self._shape, *memory)

    def _capture(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._tables.device.type != "cuda":
            return run
        # There are no tokens yet, so this writes nothing; it compiles kernels and fills caches.
        run()
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, thresholds = torch.cuda.CUDAGraph(), gc.get_threshold()
        gc.set_threshold(0)  # garbage may hold graphs of another engine, whose end would fail the capture
        # Calls of other threads, such as a watchdog of collectives, must not fail it either.
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()
        finally:
            gc.set_threshold(*thresholds)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


def _pass(model: TreeGPTModel, static: StaticPass, hidden: Tensor | None, params: SamplingParams) -> Tensor:
    """See ``CapturedPass.run``."""
    if hidden is not None:
        model.set_input_tensor(hidden)
    out = model(static.input_ids, static.context)
    if not model.post_process:
        return out
    tokens, logprobs = next_tokens(model, out, static.noise, params, kernels=True)
    static.input_ids[0].copy_(tokens)
    drawn = static.noise.new_empty(2, len(tokens))
    drawn[0].copy_(tokens)
    drawn[1].copy_(logprobs)
    return drawn


def _fill(static: StaticPass, words: np.ndarray, burst: Burst, rows: PassRows, tile_tokens: int) -> None:
    """Write the burst's positions, slots, noise and tiles into ``words``."""
    num_steps, n = burst.noise.shape
    state_slots = None if burst.states is None else burst.states[1]
    if num_steps == 1:
        tiles = static_tiles(burst.starts, burst.counts, rows, tile_tokens)
        static.pack(words, rows.positions[None], rows.slots[None], burst.noise, tiles[None], state_slots)
        return
    row = np.repeat(np.arange(n), burst.steps)
    step = np.arange(len(row)) - np.repeat(np.cumsum(burst.steps) - burst.steps, burst.steps)
    positions, slots = np.zeros((num_steps, n), np.int64), np.full((num_steps, n), -1)
    tiles = np.zeros((num_steps, n, 4), np.int64)
    positions[step, row], slots[step, row] = rows.positions, rows.slots
    tiles[step, row] = np.stack([row, np.ones_like(row), rows.positions, rows.table_begins[row]], axis=1)
    if state_slots is not None:
        # A row that has left the burst keeps the state with which it left.
        state_slots = np.where(np.arange(num_steps)[:, None] < burst.steps, state_slots, -1)
    static.pack(words, positions, slots, burst.noise, tiles, state_slots)
