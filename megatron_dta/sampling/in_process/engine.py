"""Samples rollouts with the training model in its own process, without a copy of the weights.

Each pass runs prompt parts and decoding rows through the model and waits for the device once, for the sampled tokens.
``scheduler`` plans the pass. On a mesh the ranks of a tensor group draw the same tokens, pipeline stages receive them
from the last stage, and each data-parallel replica runs its own engine. Replicas that share experts run their passes
together (``expert_passes``).

On a GPU attention reads the pages in place (``paged_context``). Passes that only decode run as CUDA graphs
(``cuda_graphs``), several of them before the host reads their tokens, and several more while it takes these
(``bursts``); on all pipeline stages at once (``pipelined_steps``).

The K/V cache exists while requests run or are held and is freed afterwards, so that training can use the memory. After
an error the engine is empty and can be started again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_dta.core.model.attention.segment_attention import choose_attention
from megatron_dta.core.model.decode.decode_context import append_context
from megatron_dta.core.model.decode.paged_cache import PagedCache
from megatron_dta.core.model.decode.paged_context import paged_context
from megatron_dta.core.model.kernel_types import upload
from megatron_dta.core.model.parallel.staged_model import Model
from megatron_dta.sampling.degenerate import DegenerateDetector
from megatron_dta.sampling.in_process.bursts import Drawn, Flight, Launcher
from megatron_dta.sampling.in_process.cache_size import head_shape, max_pages
from megatron_dta.sampling.in_process.cuda_graphs import MOST_TOKENS, DecodeSteps, noise_of
from megatron_dta.sampling.in_process.drafted_rows import DraftedRows
from megatron_dta.sampling.in_process.drafting import Drafting, NoDrafting, Round, drafts_of, guesses_of
from megatron_dta.sampling.in_process.expert_passes import DecodingPasses
from megatron_dta.sampling.in_process.next_token import EvaluationMode, next_tokens
from megatron_dta.sampling.in_process.pages import PagePool
from megatron_dta.sampling.in_process.pipelined_steps import decode_steps
from megatron_dta.sampling.in_process.request import Request, check_length
from megatron_dta.sampling.in_process.row_states import RowStates
from megatron_dta.sampling.in_process.scheduler import Pass, Scheduler
from megatron_dta.sampling.in_process.settings import FEW_REQUESTS, EngineSettings
from megatron_dta.sampling.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams

# Bursts are short while a draft is likely soon, and full again after this many short bursts without a draft.
_PASSES_BETWEEN_DRAFTS, _MAX_SHORT_BURSTS = 4, 4

_COUNTS = ("decoded_tokens", "requests", "forwards", "seconds", "peak_pages", "drafted_tokens", "accepted_drafts")
_COUNTS += ("static_forwards", "captures", "waiting_seconds", "tail_seconds")
# Rows of a tail, over the most of the phase.
_TAIL = 0.25


class InProcessEngine(RolloutEngine):
    """Continuous batching over a paged K/V cache; see the module's docstring.

    Args:
        model: the model to sample from; it is not modified.
        drafting: proposes drafts to verify; does not change the samples. It may be replaced while nothing runs.
    """

    def __init__(self, model: Model, settings: EngineSettings | None = None, drafting: Drafting | None = None) -> None:
        self.drafting: Drafting = drafting or NoDrafting()
        self._settings = settings = settings or EngineSettings()
        self._model, self._passes, self._states = model, DecodingPasses(model), RowStates(model)
        self._shape, self._device = head_shape(model), next(model.parameters()).device
        sizes = self._shape.head_size, self._shape.dtype, self._device
        self._is_paged = self._shape.has_kernels and choose_attention(settings.attention_impl, *sizes)
        self._steps: DecodeSteps | None = None
        self._flight: Flight | None = None  # launched ahead of the tokens that were read
        self._drafted: DraftedRows | None = None
        self._runs_on, self._round_seconds = False, 0.0  # whether its rows keep the pages of the next pass
        # Many requests take memory for the tables of their pages, and for what attention to latents computes; their
        # states would take that of their K and V.
        most = MOST_TOKENS if self._shape.has_kernels and model.max_sequence_length <= 65_536 else 1024
        self._most_rows = settings.max_requests or (FEW_REQUESTS if self._states.is_used else most)
        if settings.static_passes and (self._is_paged or not self._shape.has_kernels):
            self._steps = decode_steps(model, self._shape, settings.block_size, self._most_rows)
        self._one_a_row = self._states.is_used or not self._shape.has_kernels  # token of a pass at fixed addresses
        self._drafts_static = self._steps is not None and not self._one_a_row and not settings.stop_degenerate
        self._params: SamplingParams | None = None
        self._mode = EvaluationMode(model)
        self._iteration = self._policy_version = self._arrivals = self._undrafted = self._captures = self._most_live = 0
        self._running: dict[int, Request] = {}
        self._held: dict[int, Request] = {}
        self._cache: PagedCache | None = None
        self._counts = dict.fromkeys((*_COUNTS, *["stopped_degenerate"] * settings.stop_degenerate), 0.0)
        self._scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        pool, sure = PagePool(self._settings.block_size), self._settings.max_requests or FEW_REQUESTS
        return self._states.scheduler(pool, self._most_rows, self._settings.max_tokens, sure)

    @property
    def pages_in_use(self) -> int:
        """Number of cache pages that running or held requests use."""
        return self._scheduler.pool.pages_in_use

    def start(self, params: SamplingParams, iteration: int) -> None:
        self._refuse_while_running("start")
        self.release(list(self._held))
        self._params, self._iteration, self._undrafted, self._most_live = params, iteration, 0, 0
        self.drafting.started(params)
        settings, static = self._settings, 0 if self._steps is None else self._steps.most_tokens
        sizes = settings.block_size, settings.buffer_size_gb, settings.max_tokens, static, self._most_rows
        self._scheduler.pool.max_pages = max_pages(self._model, *sizes)
        if self._steps is not None:
            self._steps.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        new, of_context, pool = dict[int, Request](), dict[int, Request](), self._scheduler.pool
        most, vocab_size = self._model.max_sequence_length, self._model.true_vocab_size
        for request in requests:
            twin = of_context.get(id(request.token_ids))
            check_request(request, self._held, self._running, new, vocab_size=vocab_size, check_tokens=twin is None)
            check_length(request, most, pool.page_size, pool.max_pages)
            parent = None if request.parent is None else self._held[request.parent]
            sequence = Request(request, self._arrivals + len(new), self._settings.block_size, parent, twin)
            of_context.setdefault(id(request.token_ids), sequence)
            if parent is not None and sequence.common_with_parent == 0:
                raise ValueError(f"request {request.request_id}: shares no prefix with its parent {request.parent}")
            new[request.request_id] = sequence
        self._arrivals += len(new)
        self._running.update(new)
        for sequence in new.values():
            sequence.detector = DegenerateDetector() if self._settings.stop_degenerate else None
            self._scheduler.submit(sequence)
        self.drafting.submitted(new.values())

    def poll(self, patient: bool = True) -> list[GenerationResult]:
        began = time.perf_counter()
        finished: list[Request] = []
        try:
            with self._mode:
                round_began = began
                while not finished and not self._scheduler.is_idle:
                    finished, round_ended = self._run(), time.perf_counter()
                    self._count_seconds(round_ended - round_began)
                    round_began = round_ended
                    if not patient:
                        break
        except BaseException:
            self.close()
            raise
        results = [self._finish(sequence) for sequence in finished]
        self._free_when_unused()
        self._counts["seconds"] += time.perf_counter() - began
        return results

    def _count_seconds(self, seconds: float) -> None:
        """Count the wall seconds of a round."""
        live = len(self._scheduler.running)
        self._most_live = max(self._most_live, live)
        self._counts["waiting_seconds"] += seconds * self._scheduler.is_full
        self._counts["tail_seconds"] += seconds * (live < _TAIL * self._most_live)
        self._round_seconds = seconds
        if self._drafted is None or not self._drafted.rows:
            self.drafting.ran(seconds)

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id not in self._held:
                raise ValueError(f"request {request_id} is not held")
        released = [self._held.pop(request_id) for request_id in dict.fromkeys(request_ids)]
        self._scheduler.release(*released)
        for sequence in released:
            self.drafting.released(sequence)
        self._free_when_unused()

    def statistics(self) -> dict[str, float]:
        """The statistics of all engines, the scheduler's counts, ``waiting_seconds`` (while requests waited because as
        many ran as may), ``tail_seconds`` (while less than ``_TAIL`` of the most ran), ``forwards`` (passes),
        ``static_forwards`` and ``captures`` (of graphs), ``peak_pages``, tokens of drafts, and ``stopped_degenerate``
        if they are stopped."""
        counts = self._counts | {name: float(count) for name, count in self._scheduler.counts.items()}
        return counts | {"peak_pages": float(max(counts["peak_pages"], self._scheduler.pool.peak_pages))}

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """Drop all held K/V, since the trainer has changed the weights in place."""
        self._refuse_while_running("update_weights")
        self._scheduler.release(*self._held.values())
        self._free_when_unused()
        self._policy_version = policy_version
        self.drafting.weights_changed(policy_version)

    def join(self) -> None:
        with self._mode:
            self._passes.join()
        self._mode.leave()
        self.drafting.ended()

    def state_dict(self) -> dict[str, Any]:
        return self.drafting.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drafting.load_state_dict(state)

    def timing(self) -> dict[str, float]:
        return self.drafting.timing()

    def close(self) -> None:
        counts = self.statistics()
        self._running, self._held = {}, {}
        self._cache, self._flight, self._drafted, self._runs_on = None, None, None, False
        self._states.clear()
        self._scheduler = self._new_scheduler()
        self._scheduler.counts.update((name, int(counts[name])) for name in self._scheduler.counts)
        self._counts["peak_pages"] = counts["peak_pages"]
        self._params = None
        self._mode.leave()
        self.drafting.abandoned()

    def _run(self) -> list[Request]:
        """Run a forward pass, or a burst of them, and take its tokens. Returns the requests that it finished."""
        began = time.perf_counter()
        if self._flight is not None:
            self.drafting.wants(len(self._flight.live()))  # a round without drafts, whatever the answer
            return self._land(self._flight, began)
        if self._drafted is None and not self._undrafted and self._drafts_static:
            self._drafted = DraftedRows(self._launcher(), self.drafting, self._settings.max_tokens, self._take_drawn)
        if self._drafted is not None and (finished := self._drafted.round()) is not None:
            return finished
        self._drafted = None
        plan = self._scheduler.next_pass()
        is_static = self._steps is not None and self._steps.takes(plan)
        most = min(self._settings.max_tokens, self._steps.most_tokens) if is_static else self._settings.max_tokens
        drafts = drafts_of(plan, self.drafting, self._scheduler, most)
        num_drafted = sum(map(len, drafts))
        num_tokens = sum(plan.counts) + num_drafted
        is_static = is_static and (num_tokens == len(plan.rows) or not self._one_a_row)
        if is_static and num_tokens == len(plan.rows):
            is_short = self._undrafted < _MAX_SHORT_BURSTS and self.drafting.asks_next
            burst = min(self._settings.burst, _PASSES_BETWEEN_DRAFTS if is_short else self._settings.burst)
            return self._land(self._launcher().first(plan, drafts, burst), began)
        drawn = (self._run_static if is_static else self._run_eager)(plan, drafts)
        return self._take(drawn if num_drafted else replace(drawn, guesses=None), began, num_tokens, 1) if drawn else []

    def _take_drawn(self, drawn: Drawn, captures: int, runs_on: bool) -> list[Request]:
        """``_take`` of a pass of ``DraftedRows``; ``runs_on``: the next one has been launched."""
        self._count_static(1, captures)
        self._runs_on, began = runs_on, time.perf_counter() - self._round_seconds
        finished, self._runs_on = self._take(drawn, began, len(drawn.tokens), 0), False
        if self._drafted.rows:  # this is not the last round yet
            self.drafting.ran(self._round_seconds)
        return finished

    def _run_eager(self, plan: Pass, drafts: list[np.ndarray]) -> Drawn | None:
        """Run one pass. Returns what was drawn after the last and each drafted token of the rows that get tokens."""
        cache = self._cache_for(plan)
        starts = np.array([sequence.num_computed_tokens for sequence in plan.rows])
        widths = np.array([len(draft) for draft in drafts])
        counts, ready = np.array(plan.counts) + widths, plan.ready
        tables = [sequence.table for sequence in plan.rows]
        if self._is_paged:
            context, order = paged_context(cache, starts, counts, tables, self._shape)
        else:
            context, order = append_context(cache, starts, counts, tables)
        self._states.attach(context, [plan.rows[i] for i in order], starts[order], counts[order], widths[order])
        pieces = []
        for i in order:
            pieces += [plan.rows[i].tokens[starts[i] : starts[i] + plan.counts[i]], drafts[i]]
        (token_ids,) = upload([np.concatenate(pieces)], self._device)
        hidden = self._passes(token_ids.unsqueeze(0), context)
        self._counts["forwards"] += 1
        ends = np.empty(len(order), np.int64)
        ends[order] = np.cumsum(counts[order])
        rows = self._scheduler.complete(plan)
        if not rows:
            return None
        last = [np.arange(ends[i] - widths[i] - 1, ends[i]) for i in ready]
        (last,) = upload([np.concatenate(last)], self._device)
        drafts = [drafts[i] for i in ready]
        noise = noise_of(rows, drafts, self._params, self._iteration)
        (noise,) = upload([noise], self._device, torch.float64)
        drawn = next_tokens(self._model, hidden[last], noise, self._params, self._is_paged)
        drawn = torch.stack([part.double() for part in drawn])
        tokens, logprobs = drawn.cpu().numpy()  # the only place that waits; a float64 represents every token id exactly
        return Drawn(rows, tokens.astype(np.int32), logprobs, widths[ready] + 1, guesses_of(drafts))

    def _run_static(self, plan: Pass, drafts: list[np.ndarray]) -> Drawn:
        """Like ``_run_eager`` if all rows get tokens, for a pass with drafts or parts of prompts."""
        flight = self._launcher().first(plan, drafts, 1)
        self._count_static(1)
        (tokens,), (logprobs,) = flight.running.read()
        self._scheduler.complete(plan)
        widths = np.array([len(draft) + 1 for draft in drafts])
        return Drawn(plan.rows, tokens[flight.columns], logprobs[flight.columns], widths, guesses_of(drafts))

    def _land(self, flight: Flight, began: float) -> list[Request]:
        """Launch the next burst if possible, and take the tokens of ``flight``. Returns the requests that ended."""
        self._flight = None
        if self._settings.burst > 1 and not self.drafting.asks_next:
            self._flight = self._launcher().ahead(flight, self._settings.burst)
        self._count_static(flight.num_passes)
        drawn = flight.drawn()
        return self._take(drawn, began, len(drawn.rows), 0)

    def _launcher(self) -> Launcher:
        return Launcher(self._steps, self._scheduler, self._states, self._cache_for, self._params, self._iteration)

    def _count_static(self, passes: int, captures: int | None = None) -> None:
        for name in ("forwards", "static_forwards"):
            self._counts[name] += passes
        self._counts["captures"] = float(self._steps.captures if captures is None else captures)

    def _take(self, drawn: Drawn, began: float, num_tokens: int, computed: int) -> list[Request]:
        """Append what each row keeps of what was drawn, after passes of ``num_tokens`` tokens that began at ``began``,
        of which ``computed`` is recorded for each row. Returns the requests that ended."""
        finished, appended, drafted, runs_on = [], [], None, self._runs_on or self._flight is not None
        self._undrafted = self._undrafted + 1 if drawn.guesses is None else 0
        if not np.isfinite(drawn.logprobs).all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        limits = np.array([len(sequence.tokens) - sequence.num_tokens for sequence in drawn.rows])
        counts, has_ended = drawn.keep(limits, self._params.eos_ids)
        columns = (drawn.counts.cumsum() - drawn.counts).tolist(), counts.tolist(), has_ended.tolist()
        for sequence, begin, count, is_end in zip(drawn.rows, *columns, strict=True):
            appended.append(drawn.tokens[begin : begin + count])
            sequence.extend(appended[-1], drawn.logprobs[begin : begin + count])
            self._scheduler.commit_draft(sequence, count - computed, runs_on and not is_end)
            if is_end:
                finished.append(sequence)
        self._scheduler.finish(*finished)
        self._states.commit()
        self._counts["decoded_tokens"] += int(counts.sum())
        if drawn.guesses is not None:
            drafted = drawn.counts - 1
            self._counts["drafted_tokens"] += int(drafted.sum())
            self._counts["accepted_drafts"] += int(counts.sum()) - len(counts)
        captures, self._captures = self._captures, self._counts["captures"]
        seconds, captured = time.perf_counter() - began, self._captures > captures
        self.drafting.verified(Round(drawn.rows, drafted, appended, seconds, num_tokens, captured))
        self.drafting.finished(finished)
        if self._flight is not None and not self._flight.live():
            self._flight.running.read()  # nothing may run when the caller changes weights
            self._flight = None
        return finished

    def _finish(self, sequence: Request) -> GenerationResult:
        request, response = sequence.generation, sequence.response.copy()
        del self._running[request.request_id]
        sequence.detector, is_stop = None, int(response[-1]) in self._params.eos_ids
        if not is_stop and sequence.num_tokens < len(sequence.tokens):
            self._counts["stopped_degenerate"] += 1
        if request.hold:
            self._held[request.request_id] = sequence
        self._counts["requests"] += 1
        dtype = np.float64 if self._shape.dtype == torch.float64 else np.float32
        logprobs = sequence.logprobs[: len(response)].astype(dtype)
        end = FinishReason.STOP if is_stop else FinishReason.LENGTH
        return GenerationResult(request.request_id, response, logprobs, end, self._policy_version)

    def _refuse_while_running(self, call: str) -> None:
        if self._running:
            raise ValueError(f"{call}: {len(self._running)} requests are running; poll until they are finished")

    def _free_when_unused(self) -> None:
        if self._scheduler.is_idle and self._scheduler.num_held == 0:
            self._scheduler.pool.clear()
            self._states.clear()
            self._cache = None

    def _cache_for(self, plan: Pass) -> PagedCache:
        """The cache, grown to all pages of the pool, after the page copies of the plan."""
        if self._cache is None:
            shape, size, layers = self._shape, self._settings.block_size, self._model.attention_layers
            self._cache = PagedCache(layers, size, shape.num_groups, shape.sizes, shape.dtype, self._device)
        self._cache.grow(self._scheduler.pool.num_pages)
        self._cache.copy(list(plan.copies.values()), list(plan.copies))
        return self._cache
