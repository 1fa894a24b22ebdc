"""Samples rollouts with the training model in its own process, without a copy of the weights.

Each pass runs a mixture of prompt parts and decoding rows through the model and waits for the device once, for the
sampled tokens. ``scheduler`` plans the pass and ``decode_context`` computes its attention. The engine supports every
mesh of ``build_model``: the ranks of a tensor group gather the logits and draw the same tokens, pipeline stages receive
the tokens from the last stage, and each data-parallel replica runs its own engine. Replicas that share experts run
their passes together (``expert_passes``). The logprobs are those of the trainer.

On a GPU attention reads the pages in place (``paged_context``). Passes that only decode run as CUDA graphs, several of
them before the host reads their tokens (``cuda_graphs``).

The K/V cache exists while requests run or are held and is freed afterwards, so that training can use the memory. After
an error the engine is empty and can be started again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dta.common.errors import InputError
from megatron_dta.model import Model, choose_attention
from megatron_dta.model.attention.decode_context import append_context
from megatron_dta.model.attention.paged_cache import PagedCache
from megatron_dta.model.attention.paged_context import paged_context
from megatron_dta.sampling.engines.in_process.cache_size import head_shape, max_pages
from megatron_dta.sampling.engines.in_process.cuda_graphs import MOST_TOKENS, Burst, DecodeSteps, noise_of
from megatron_dta.sampling.engines.in_process.drafting import Drafting, drafts_of
from megatron_dta.sampling.engines.in_process.expert_passes import DecodingPasses
from megatron_dta.sampling.engines.in_process.next_token import next_tokens, sampling_mode
from megatron_dta.sampling.engines.in_process.pages import PagePool
from megatron_dta.sampling.engines.in_process.scheduler import Pass, Request, Scheduler
from megatron_dta.sampling.engines.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.speculation.degenerate import DegenerateDetector

# Bursts are short while a draft is likely soon, and full again after this many short bursts without a draft.
_PASSES_BETWEEN_DRAFTS, _MAX_SHORT_BURSTS = 4, 4

_COUNTS = ("decoded_tokens", "requests", "forwards", "seconds", "peak_pages", "drafted_tokens", "accepted_drafts")
_COUNTS += ("stopped_degenerate", "static_forwards", "captures")


class InProcessEngine(RolloutEngine):
    """Continuous batching over a paged K/V cache; see the module's docstring.

    Args:
        model: the model to sample from; it is not modified.
        max_requests: maximum number of running requests; does not change the samples.
        block_size: positions in a page.
        buffer_size_gb: size of the cache in GiB on each rank. None: half of the free memory on a GPU, else no limit.
        max_tokens: maximum number of tokens in a forward pass; longer prompts are split over passes.
        drafting: proposes drafts to verify; does not change the samples. It may be replaced while nothing runs.
        stop_degenerate: end requests that have degenerated into a loop or noise as if their length were reached.
        attention_impl: "triton" for the kernels that read pages in place, "reference" for PyTorch's attention, "auto"
            for the kernels wherever they are supported.
        static_passes: decode with tensors at fixed addresses, in CUDA graphs on a GPU. The caller must have checked
            ``cuda_graphs.why_not_captured``.
        burst: maximum number of passes that run before their tokens are read, with ``static_passes``.
    """

    def __init__(
        self,
        model: Model,
        max_requests: int = 256,
        block_size: int = 16,
        buffer_size_gb: float | None = None,
        max_tokens: int = 4096,
        drafting: Drafting | None = None,
        stop_degenerate: bool = False,
        attention_impl: str = "auto",
        static_passes: bool = False,
        burst: int = 8,
    ) -> None:
        self.drafting, self._stop_degenerate, self._burst = drafting, stop_degenerate, burst
        self._model, self._passes = model, DecodingPasses(model)
        self._shape, device = head_shape(model), next(model.parameters()).device
        self._is_paged = choose_attention(attention_impl, self._shape.head_size, self._shape.dtype, device)
        self._steps: DecodeSteps | None = None
        if static_passes and self._is_paged:
            self._steps = DecodeSteps(model, self._shape, block_size, max_requests)
        self._max_requests, self._block_size, self._max_tokens = max_requests, block_size, max_tokens
        self._buffer_size_gb = buffer_size_gb
        self._params: SamplingParams | None = None
        self._iteration = self._policy_version = self._arrivals = self._undrafted = 0
        self._running: dict[int, Request] = {}
        self._held: dict[int, Request] = {}
        self._detectors: dict[Request, DegenerateDetector] = {}
        self._cache: PagedCache | None = None
        self._counts = dict.fromkeys(_COUNTS, 0.0)
        self._scheduler = Scheduler(PagePool(block_size), max_requests, max_tokens)

    @property
    def pages_in_use(self) -> int:
        """Number of cache pages that running or held requests use."""
        return self._scheduler.pool.pages_in_use

    def start(self, params: SamplingParams, iteration: int) -> None:
        self._refuse_while_running("start")
        self.release(list(self._held))
        self._params, self._iteration = params, iteration
        if self.drafting is not None:
            self.drafting.started(params)
        self._scheduler.pool.max_pages = max_pages(self._model, self._shape, self._block_size, self._buffer_size_gb)
        if self._steps is not None:
            self._steps.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        new: dict[int, Request] = {}
        for request in requests:
            self._check(request, new)
            parent = None if request.parent is None else self._held[request.parent]
            sequence = Request(request, self._arrivals + len(new), self._block_size, parent)
            if parent is not None and sequence.common_with_parent == 0:
                raise ValueError(f"request {request.request_id}: shares no prefix with its parent {request.parent}")
            new[request.request_id] = sequence
        self._arrivals += len(new)
        self._running.update(new)
        for sequence in new.values():
            self._scheduler.submit(sequence)
            if self.drafting is not None:
                self.drafting.submitted(sequence)

    def poll(self) -> list[GenerationResult]:
        began = time.perf_counter()
        finished: list[Request] = []
        try:
            with sampling_mode(self._model):
                while not finished and not self._scheduler.is_idle:
                    round_began = time.perf_counter()
                    finished = self._run(self._scheduler.next_pass())
                    if self.drafting is not None:
                        self.drafting.ran(time.perf_counter() - round_began)
        except BaseException:
            self.close()
            raise
        results = [self._finish(sequence) for sequence in finished]
        self._free_when_unused()
        self._counts["seconds"] += time.perf_counter() - began
        return results

    def release(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            if request_id not in self._held:
                raise ValueError(f"request {request_id} is not held")
            sequence = self._held.pop(request_id)
            self._scheduler.release(sequence)
            if self.drafting is not None:
                self.drafting.released(sequence)
        self._free_when_unused()

    def statistics(self) -> dict[str, float]:
        """The statistics of all engines, and ``forwards`` (passes), ``static_forwards`` (in graphs), ``captures``
        (of graphs), ``preemptions``, ``recomputed_tokens`` (after preemptions), ``evictions`` (held requests that lost
        their K/V), ``peak_pages``, ``drafted_tokens``, ``accepted_drafts`` (accepted drafted tokens) and
        ``stopped_degenerate`` (requests)."""
        counts = self._counts | {name: float(count) for name, count in self._scheduler.counts.items()}
        return counts | {"peak_pages": float(max(counts["peak_pages"], self._scheduler.pool.peak_pages))}

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """Drop all held K/V, since the trainer has changed the weights in place."""
        self._refuse_while_running("update_weights")
        for sequence in self._held.values():
            self._scheduler.release(sequence)
        self._free_when_unused()
        self._policy_version = policy_version
        if self.drafting is not None:
            self.drafting.weights_changed(policy_version)

    def join(self) -> None:
        with sampling_mode(self._model):
            self._passes.join()
        if self.drafting is not None:
            self.drafting.ended()

    def close(self) -> None:
        counts = self.statistics()
        for requests in (self._running, self._held, self._detectors):
            requests.clear()
        self._cache = None
        self._scheduler = Scheduler(PagePool(self._block_size), self._max_requests, self._max_tokens)
        self._scheduler.counts.update((name, int(counts[name])) for name in self._scheduler.counts)
        self._counts["peak_pages"] = counts["peak_pages"]
        self._params = None
        if self.drafting is not None:
            self.drafting.abandoned()

    def _run(self, plan: Pass) -> list[Request]:
        """Run one forward pass and take its tokens. Returns the requests that it finished."""
        began = time.perf_counter()
        is_static = self._steps is not None and self._steps.takes(plan, 0)
        most = min(self._max_tokens, MOST_TOKENS) if is_static else self._max_tokens
        drafts = drafts_of(plan, self.drafting, self._scheduler, most)
        if is_static:
            return self._run_static(plan, drafts, began)
        cache = self._cache_for(plan)
        starts = np.array([sequence.num_computed_tokens for sequence in plan.rows])
        counts = np.array(plan.counts) + [len(draft) for draft in drafts]
        tables = [sequence.table for sequence in plan.rows]
        if self._is_paged:
            context, order = paged_context(cache, starts, counts, tables, self._shape)
        else:
            context, order = append_context(cache, starts, counts, tables)
        pieces = []
        for i in order:
            pieces += [plan.rows[i].tokens[starts[i] : starts[i] + plan.counts[i]], drafts[i]]
        hidden = self._passes(self._to_device(np.concatenate(pieces).astype(np.int64)).unsqueeze(0), context)
        self._counts["forwards"] += 1
        end = np.cumsum(counts[order])
        place = dict(zip((plan.rows[i] for i in order), end.tolist(), strict=True))
        draft_of = dict(zip(plan.rows, drafts, strict=True))
        rows = self._scheduler.complete(plan)
        if not rows:
            return []
        own_drafts = [draft_of[sequence] for sequence in rows]
        last = [np.arange(place[row] - len(draft_of[row]) - 1, place[row]) for row in rows]
        noise = self._to_device(noise_of(rows, own_drafts, self._params, self._iteration)[0])
        hidden = hidden[self._to_device(np.concatenate(last))]
        drawn = next_tokens(self._model, hidden, noise, self._params, self._is_paged)
        drawn = torch.stack([part.double() for part in drawn])
        self._catch_up()
        # The only place that waits for the device. A float64 represents every token id exactly.
        tokens, logprobs = drawn.cpu().numpy()
        sampled = _by_row(tokens.astype(np.int32), logprobs, [len(draft) + 1 for draft in own_drafts])
        return self._take(rows, sampled, own_drafts, began, int(counts.sum()))

    def _run_static(self, plan: Pass, drafts: list[np.ndarray], began: float) -> list[Request]:
        """Like ``_run`` if all rows decode: one pass with drafts, or a burst of passes without."""
        rows, is_drafted = plan.rows, any(map(len, drafts))
        is_short = self.drafting is not None and self._undrafted < _MAX_SHORT_BURSTS and self.drafting.is_hopeful
        most = min(self._burst, _PASSES_BETWEEN_DRAFTS) if is_short else self._burst
        steps = self._scheduler.max_burst_steps(rows, 1 if is_drafted else most)
        cache = self._cache_for(plan)
        pieces = []
        for row, draft in zip(rows, drafts, strict=True):
            pieces += [row.tokens[row.num_tokens - 1 : row.num_tokens], draft]
        counts = np.array([len(draft) + 1 for draft in drafts])
        starts = np.array([row.num_computed_tokens for row in rows])
        noise = noise_of(rows, drafts, self._params, self._iteration, int(steps.max()))
        burst = Burst(np.concatenate(pieces), starts, counts, [row.table for row in rows], steps, noise)
        tokens, logprobs = self._steps.run(cache, burst, self._params, self._catch_up)
        self._counts["forwards"] += len(noise)
        self._counts["static_forwards"] += len(noise)
        self._counts["captures"] = float(self._steps.captures)
        self._scheduler.complete(plan)
        if is_drafted:
            sampled = _by_row(tokens[0], logprobs[0], counts)
            return self._take(rows, sampled, drafts, began, int(counts.sum()))
        sampled = [(tokens[:n, i].astype(np.int32), logprobs[:n, i]) for i, n in enumerate(steps.tolist())]
        return self._take(rows, sampled, None, began, len(rows))

    def _catch_up(self) -> None:
        """Do deferred host work while the device runs."""
        if self.drafting is not None:
            self.drafting.catch_up()

    def _take(
        self,
        rows: list[Request],
        sampled: list[tuple[np.ndarray, np.ndarray]],
        drafts: list[np.ndarray] | None,
        began: float,
        num_tokens: int,
    ) -> list[Request]:
        """Append the accepted and the next sampled tokens to each of ``rows``. Returns the requests that ended.

        sampled: each row's tokens and logprobs, one more than its draft. drafts: None for a burst, whose inputs were
            all sampled. began: start time of the pass or burst. num_tokens: tokens of each pass.
        """
        finished, appended = [], []
        inputs = [None] * len(rows) if drafts is None else drafts
        self._undrafted = self._undrafted + 1 if drafts is None else 0
        if not np.isfinite(np.concatenate([logprobs for _, logprobs in sampled])).all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        for sequence, (own, logprobs), draft in zip(rows, sampled, inputs, strict=True):
            known = sequence.num_tokens
            is_end = self._append(sequence, own, logprobs, draft)
            appended.append(own[: sequence.num_tokens - known])
            if draft is None or len(draft):
                self._scheduler.commit_draft(sequence, len(appended[-1]) - 1)
            if is_end:
                self._scheduler.finish(sequence)
                finished.append(sequence)
        self._counts["decoded_tokens"] += sum(map(len, appended))
        if self.drafting is None:
            return finished
        seconds = time.perf_counter() - began
        if drafts is None or not any(map(len, drafts)):
            self.drafting.verified_burst(rows, appended, seconds, num_tokens)
        else:
            self._counts["drafted_tokens"] += sum(map(len, drafts))
            self._counts["accepted_drafts"] += sum(map(len, appended)) - len(rows)
            self.drafting.verified(np.array([len(draft) for draft in drafts]), appended, seconds, num_tokens)
        for sequence in finished:
            self.drafting.finished(sequence)
        return finished

    def _append(self, sequence: Request, tokens: np.ndarray, logprobs: np.ndarray, draft: np.ndarray | None) -> bool:
        """Append the sampled tokens up to the first one that differs from the draft (None: no check). Returns whether
        the request has ended."""
        ends, room, values = self._params.eos_ids, len(sequence.tokens) - sequence.num_tokens, tokens.tolist()
        guesses = values if draft is None else draft.tolist()
        if draft is None and not self._stop_degenerate and len(values) < room and ends.isdisjoint(values):
            sequence.extend(tokens, logprobs)
            return False
        taken, is_end = 0, False
        for token in values:
            taken += 1
            is_end = token in ends or taken == room or (self._stop_degenerate and self._degenerates(sequence, token))
            if is_end or (taken <= len(guesses) and token != guesses[taken - 1]):
                break
        sequence.extend(tokens[:taken], logprobs[:taken])
        return is_end

    def _degenerates(self, sequence: Request, token: int) -> bool:
        detector = self._detectors.setdefault(sequence, DegenerateDetector())
        stops = detector.feed(np.array([token])) is not None
        self._counts["stopped_degenerate"] += stops
        return stops

    def _finish(self, sequence: Request) -> GenerationResult:
        request, response = sequence.generation, sequence.response.copy()
        del self._running[request.request_id]
        self._detectors.pop(sequence, None)
        if request.hold:
            self._held[request.request_id] = sequence
        self._counts["requests"] += 1
        dtype = np.float64 if next(self._model.parameters()).dtype == torch.float64 else np.float32
        return GenerationResult(
            request.request_id,
            response,
            sequence.logprobs[: len(response)].astype(dtype),
            FinishReason.STOP if int(response[-1]) in self._params.eos_ids else FinishReason.LENGTH,
            self._policy_version,
        )

    def _check(self, request: GenerationRequest, new: dict[int, Request]) -> None:
        check_request(request, self._running, self._held, new, vocab_size=self._model.true_vocab_size)
        tokens, where = request.token_ids, f"request {request.request_id}"
        length = len(tokens) + request.max_tokens
        if length > self._model.max_sequence_length:
            raise ValueError(
                f"{where}: {len(tokens)} tokens and a response of up to {request.max_tokens} do not fit into "
                f"--max-position-embeddings {self._model.max_sequence_length}; raise it or lower "
                "--rollout-max-response-len"
            )
        most = self._scheduler.pool.max_pages
        if most is not None and -(-length // self._block_size) > most:
            raise InputError(
                f"--inference-dynamic-batching-buffer-size-gb: {most} pages of {self._block_size} positions "
                f"cannot hold one sequence of {length} tokens; raise it"
            )
        if request.parent is not None and request.parent not in self._held:
            raise ValueError(f"{where}: its parent {request.parent} is not held")

    def _refuse_while_running(self, call: str) -> None:
        if self._running:
            raise ValueError(f"{call}: {len(self._running)} requests are running; poll until they are finished")

    def _free_when_unused(self) -> None:
        if self._scheduler.is_idle and self._scheduler.num_held == 0:
            self._scheduler.pool.clear()
            self._cache = None

    def _cache_for(self, plan: Pass) -> PagedCache:
        """The cache, grown to all pages of the pool, after the page copies of the plan."""
        cache = self._allocated(self._scheduler.pool.num_pages)
        cache.copy([source for source, _ in plan.copies], [target for _, target in plan.copies])
        return cache

    def _allocated(self, num_pages: int) -> PagedCache:
        if self._cache is None:
            shape, device = self._shape, next(self._model.parameters()).device
            layers = self._model.layer_numbers
            self._cache = PagedCache(layers, self._block_size, shape.num_groups, shape.head_size, shape.dtype, device)
        self._cache.grow(num_pages)
        return self._cache

    def _to_device(self, array: np.ndarray) -> Tensor:
        device, tensor = next(self._model.parameters()).device, torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _by_row(tokens: np.ndarray, logprobs: np.ndarray, counts: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Splits both arrays into rows of ``counts[i]`` entries."""
    return [(tokens[b - n : b], logprobs[b - n : b]) for n, b in zip(counts, np.cumsum(counts).tolist(), strict=True)]
