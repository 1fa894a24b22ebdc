"""Rollouts from the training weights themselves: no copy of the weights, and the trainer's own logprobs.

Each pass runs a mixture of prompt chunks and decoding rows through the model (``scheduler`` decides, ``decode_context``
attends) and waits for the device once, for the sampled tokens. It works with whatever ``build_model`` gives: the ranks
of a tensor group gather the logits and draw the same tokens, a pipeline's stages get them from the last one, and
data-parallel replicas run engines of their own, in step where they share experts (``passes``).

K and V exist while requests run or are held, and are given back to the device afterwards, so that training has the
memory. After an error the engine is empty and can be started again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Requests
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_dta.errors import InputError
from megatron_dta.model import Model, current_mesh
from megatron_dta.model.decode_context import append_context
from megatron_dta.model.paged_cache import PagedCache
from megatron_dta.sampling.engines.interface import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    RolloutEngine,
    check_request,
)
from megatron_dta.sampling.engines.pages import PagePool
from megatron_dta.sampling.engines.scheduler import Pass, Scheduler, Sequence
from megatron_dta.sampling.keyed_random import keyed_uniform
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.passes import DecodingPasses
from megatron_dta.sampling.sampler import next_tokens, sampling_mode

# Without a budget on a GPU: how much of the memory that is free when a phase starts may become K/V. Not all of it,
# because activations, logits and the copy of a layer's pages when the pool grows need some.
_SHARE_OF_FREE_MEMORY = 0.5


class InProcessEngine(RolloutEngine):
    """Continuous batching over a paged K/V cache; see the module's docstring.

    Args:
        model: the weights to sample from, left as they are.
        max_requests: most sequences decoded at once; does not change the samples.
        block_size: positions of a page.
        buffer_size_gb: memory of the cache in GiB on each rank; None for as much as is asked for (on a GPU: half of
            what is free).
        max_tokens: most tokens of one forward pass: longer prompts are computed in chunks.
    """

    def __init__(
        self,
        model: Model,
        max_requests: int = 256,
        block_size: int = 16,
        buffer_size_gb: float | None = None,
        max_tokens: int = 4096,
    ) -> None:
        self._model, self._passes = model, DecodingPasses(model)
        self._max_requests, self._block_size, self._max_tokens = max_requests, block_size, max_tokens
        self._buffer_size_gb = buffer_size_gb
        self._params: SamplingParams | None = None
        self._iteration = self._policy_version = self._arrivals = 0
        self._running: dict[int, Sequence] = {}
        self._held: dict[int, Sequence] = {}
        self._cache: PagedCache | None = None
        self._counts = dict.fromkeys(("decoded_tokens", "requests", "forwards", "seconds", "peak_pages"), 0.0)
        self._scheduler = Scheduler(PagePool(block_size), max_requests, max_tokens)

    @property
    def pages_in_use(self) -> int:
        """Pages of the cache that running or held requests have."""
        return self._scheduler.pool.pages_in_use

    def start(self, params: SamplingParams, iteration: int) -> None:
        self._refuse_while_running("start")
        self.release(list(self._held))
        self._params, self._iteration = params, iteration
        self._scheduler.pool.max_pages = self._max_pages()

    def submit(self, requests: Requests[GenerationRequest]) -> None:
        if self._params is None:
            raise ValueError("the engine was not started")
        new: dict[int, Sequence] = {}
        for request in requests:
            self._check(request, new)
            parent = None if request.parent is None else self._held[request.parent]
            sequence = Sequence(request, self._arrivals + len(new), self._block_size, parent)
            if parent is not None and sequence.common_with_parent == 0:
                raise ValueError(f"request {request.request_id}: shares no prefix with its parent {request.parent}")
            new[request.request_id] = sequence
        self._arrivals += len(new)
        self._running.update(new)
        for sequence in new.values():
            self._scheduler.submit(sequence)

    def poll(self) -> list[GenerationResult]:
        began = time.perf_counter()
        finished: list[Sequence] = []
        try:
            with sampling_mode(self._model):
                while not finished and not self._scheduler.is_idle:
                    finished = self._run(self._scheduler.next_pass())
        except BaseException:
            self.close()
            raise
        results = [self._finish(sequence) for sequence in finished]
        self._free_when_unused()
        self._counts["seconds"] += time.perf_counter() - began
        return results

    def release(self, request_ids: Requests[int]) -> None:
        for request_id in request_ids:
            if request_id not in self._held:
                raise ValueError(f"request {request_id} is not held")
            self._scheduler.release(self._held.pop(request_id))
        self._free_when_unused()

    def statistics(self) -> dict[str, float]:
        """Besides those of all engines: ``forwards`` (passes), ``preemptions``, ``recomputed_tokens`` (after those),
        ``evictions`` (held requests that lost their K/V) and ``peak_pages``.
        """
        counts = self._counts | {name: float(count) for name, count in self._scheduler.counts.items()}
        return counts | {"peak_pages": float(max(counts["peak_pages"], self._scheduler.pool.peak_pages))}

    def update_weights(self, policy_version: int, checkpoint: Path | None = None) -> None:
        """The trainer has changed the weights in place; what is held was computed with the old ones and is dropped."""
        self._refuse_while_running("update_weights")
        for sequence in self._held.values():
            self._scheduler.release(sequence)
        self._free_when_unused()
        self._policy_version = policy_version

    def join(self) -> None:
        with sampling_mode(self._model):
            self._passes.join()

    def close(self) -> None:
        counts = self.statistics()
        self._running.clear()
        self._held.clear()
        self._cache = None
        self._scheduler = Scheduler(PagePool(self._block_size), self._max_requests, self._max_tokens)
        self._scheduler.counts.update((name, int(counts[name])) for name in self._scheduler.counts)
        self._counts["peak_pages"] = counts["peak_pages"]
        self._params = None

    def _run(self, plan: Pass) -> list[Sequence]:
        """One forward pass and its tokens; the sequences that it ends."""
        cache = self._allocated(self._scheduler.pool.num_pages)
        cache.copy([source for source, _ in plan.copies], [target for _, target in plan.copies])
        starts = np.array([sequence.computed for sequence in plan.rows])
        counts = np.array(plan.counts)
        context, order = append_context(cache, starts, counts, [sequence.table for sequence in plan.rows])
        pieces = [plan.rows[i].tokens[starts[i] : starts[i] + counts[i]] for i in order]
        hidden = self._passes(self._to_device(np.concatenate(pieces).astype(np.int64)).unsqueeze(0), context)
        self._counts["forwards"] += 1
        last_token = np.cumsum(counts[order]) - 1
        place = dict(zip((plan.rows[i] for i in order), last_token.tolist(), strict=True))
        rows = self._scheduler.complete(plan)
        if not rows:
            return []
        return self._sample(rows, hidden[self._to_device(np.array([place[sequence] for sequence in rows]))])

    def _sample(self, rows: list[Sequence], hidden_BC: Tensor) -> list[Sequence]:
        """Append a token to each of ``rows``; those that are at their end."""
        params = self._params
        keys = np.array([sequence.request.key for sequence in rows], dtype=np.int64)
        positions = np.array([sequence.known for sequence in rows], dtype=np.int64)
        noise = keyed_uniform(params.seed, params.domain, self._iteration, keys, positions)
        drawn = next_tokens(self._model, hidden_BC, self._to_device(noise), params)
        # The only place that waits for the device; a float64 holds every token id.
        tokens, logprobs = torch.stack([part.double() for part in drawn]).cpu().numpy()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("the model's logits are not finite: its weights have diverged")
        self._counts["decoded_tokens"] += len(rows)
        finished = []
        for sequence, token, logprob in zip(rows, tokens.astype(np.int64).tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob)
            if token in params.eos_ids or sequence.known == len(sequence.tokens):
                self._scheduler.finish(sequence)
                finished.append(sequence)
        return finished

    def _finish(self, sequence: Sequence) -> GenerationResult:
        request, response = sequence.request, sequence.response.copy()
        del self._running[request.request_id]
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

    def _check(self, request: GenerationRequest, new: dict[int, Sequence]) -> None:
        check_request(request)
        request_id, tokens = request.request_id, request.token_ids
        where = f"request {request_id}"
        if request_id in self._running or request_id in self._held or request_id in new:
            raise ValueError(f"{where}: the id is in use")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._model.true_vocab_size:
            raise ValueError(f"{where}: token ids outside of the model's vocabulary of {self._model.true_vocab_size}")
        length = len(tokens) + request.max_tokens
        if length > self._model.max_sequence_length:
            raise ValueError(
                f"{where}: {len(tokens)} tokens and a response of up to {request.max_tokens} do not fit into "
                f"--max-position-embeddings {self._model.max_sequence_length}; raise it or lower "
                "--rollout-max-response-len"
            )
        max_pages = self._scheduler.pool.max_pages
        if max_pages is not None and -(-length // self._block_size) > max_pages:
            raise InputError(
                f"--inference-dynamic-batching-buffer-size-gb: {max_pages} pages of {self._block_size} positions "
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

    def _allocated(self, num_pages: int) -> PagedCache:
        if self._cache is None:
            parameter = next(self._model.parameters())
            heads, head_size = self._kv_shape()
            layers = self._model.layer_numbers
            self._cache = PagedCache(layers, self._block_size, heads, head_size, parameter.dtype, parameter.device)
        self._cache.grow(num_pages)
        return self._cache

    def _kv_shape(self) -> tuple[int, int]:
        config = self._model.config
        return config.num_query_groups // config.tensor_model_parallel_size, config.kv_channels

    def _max_pages(self) -> int | None:
        """The budget in pages: the least of the replica's ranks, which must schedule alike."""
        parameter = next(self._model.parameters())
        budget = None if self._buffer_size_gb is None else int(self._buffer_size_gb * 2**30)
        if budget is None and parameter.is_cuda:
            unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            budget = int(_SHARE_OF_FREE_MEMORY * (torch.cuda.mem_get_info()[0] + unused))
        if budget is None:
            return None
        page_bytes = PagedCache.page_bytes(
            len(self._model.layer_numbers), self._block_size, *self._kv_shape(), parameter.dtype
        )
        # A stage of an uneven pipeline may have no layer at all.
        own = budget // page_bytes if page_bytes else None
        pages = min(pages for pages in current_mesh().gather_over_replica(own) if pages is not None)
        return max(pages, 0)

    def _to_device(self, array: np.ndarray) -> Tensor:
        device = next(self._model.parameters()).device
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
