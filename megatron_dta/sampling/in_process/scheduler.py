"""Schedules requests on cache pages: continuous batching with shared prefixes.

A request has ``num_tokens`` tokens (its context, then the sampled ones) and K/V for the first ``num_computed_tokens``
of them. Each pass appends K/V: one token for a decoding request, and a run of tokens for a request that is new or was
preempted. A request gets its next token from the pass that computes its last token. Prefill, decoding, forks and
recomputation are therefore one operation.

*Sharing.* An admitted request reuses the pages of its longest cached prefix. Full pages, and the last page of a
context, are found by their digest, those of sampled tokens once their request has ended and is held; pages of the
parent are reused without one. A partly filled page is copied. If a running request is still computing the context, or
much of it, the new request waits; a short part is computed again, because a pass takes longer. Pages with a digest for
which a request waits stay when the last one that holds them ends.

*Memory.* A request is admitted if there are pages for all its tokens and one more page for each running request. If a
running request needs a page and none is free, held requests are evicted first: least recently used first, and those
without waiting children before the others. After that the request admitted last is preempted; it goes back to the
queue and is recomputed later. A single request always fits, so all requests finish. Beyond ``sure_requests`` running
ones, a request is admitted only while every running one could reach its full length without any of this.

Example: pages have 4 tokens. A request with a context of 6 tokens computes them on 2 pages and samples one token, so
``num_tokens`` is 7 and ``num_computed_tokens`` 6. A second request with the same context can reuse 5 tokens, since its
last one must run: it shares the first page, copies the second one for 1 more token, and computes one token.

The decisions depend only on the calls, so all ranks of a replica make the same ones. This module uses no tensors.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import attrgetter

import numpy as np

from megatron_dta.sampling.in_process.pages import PagePool
from megatron_dta.sampling.in_process.request import Prefix, Request

# Tokens. The pass that computes them delays all requests with the same context, too.
_SHORT_PREFIX = 64


@dataclass
class Pass:
    """One forward pass: copy pages (``copies``: target -> source), then run ``counts[i]`` tokens of ``rows[i]``."""

    rows: list[Request] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)

    @cached_property
    def ready(self) -> list[int]:
        """Rows that get a token from the pass; ask for them once it is planned and before it has run."""
        pairs = enumerate(zip(self.rows, self.counts, strict=True))
        return [i for i, (row, count) in pairs if row.num_computed_tokens + count == row.num_tokens]


class Scheduler:
    """Plans each forward pass.

    Args:
        pool: the page pool.
        max_requests: maximum number of running requests.
        max_tokens: maximum number of tokens in a pass.
        sure_requests: running requests up to which preemptions may be needed; None: up to ``max_requests``.

    Attributes:
        running: requests in the order of admission.
        waiting: requests in the order of arrival.
        counts: prefilled_tokens, reused_tokens, recomputed_tokens, preemptions, evictions.
    """

    def __init__(self, pool: PagePool, max_requests: int, max_tokens: int, sure_requests: int | None = None) -> None:
        self.pool, self.max_requests, self.max_tokens = pool, max_requests, max_tokens
        self._sure_requests = max_requests if sure_requests is None else sure_requests
        self.running: dict[Request, None] = {}
        self.waiting: list[Request] = []
        names = ("prefilled_tokens", "reused_tokens", "recomputed_tokens", "preemptions", "evictions")
        self.counts = dict.fromkeys(names, 0)
        # Finished requests that hold pages, most recently used last.
        self._held: dict[Request, None] = {}
        # Running requests by the digest of each prefix that they are computing.
        self._pending: dict[bytes, Request] = {}
        # Held requests whose pages no digest names yet: children find those of their parent without.
        self._unnamed: dict[Request, None] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return not self.running and not self.waiting

    @property
    def num_held(self) -> int:
        """Number of finished requests that hold pages."""
        return len(self._held)

    def submit(self, request: Request) -> None:
        """Add a new or preempted request to the queue."""
        if request.parent is not None:
            request.parent.waiting_children += 1
        # The parent is held until it starts.
        request.expected = [] if self._is_covered(request) else request.missing(request.common_with_parent)
        self.pool.expect(request.expected)
        bisect.insort(self.waiting, request, key=attrgetter("arrival"))

    def next_pass(self) -> Pass:
        """The next pass to run, with at least one row unless the scheduler is idle."""
        plan, budget, preemptions = Pass(), self.max_tokens, self.counts["preemptions"]
        for request in list(self.running):
            if budget and request.num_tokens - request.num_computed_tokens == 1 and self._has_page_for_next(request):
                budget -= self._run_chunk(plan, request, budget)
        for request in self.running:
            if budget and request.num_tokens - request.num_computed_tokens > 1:
                budget -= self._run_chunk(plan, request, budget)
        # Admit nothing after a preemption: the freed pages are for running requests.
        self._admit_waiting(plan, budget if self.counts["preemptions"] == preemptions else 0)
        if not plan.rows and not self.is_idle and self.counts["preemptions"] == preemptions:
            raise AssertionError("no request can run: the page pool is smaller than one request needs")
        return plan if plan.rows or self.is_idle else self.next_pass()

    def admit_ahead(self, leaving: int, budget: int) -> Pass | None:
        """Admit up to ``budget`` waiting requests that need one token computed, while passes run after which
        ``leaving`` running requests end. None if instead the next request in the queue could run and needs more."""
        plan = Pass()
        self._admit_waiting(plan, budget, leaving, 1)
        if not plan.rows and self.waiting and self._takes_another(self.waiting[0], self._spare_pages(), leaving):
            return None
        return plan

    def _admit_waiting(self, plan: Pass, budget: int, leaving: int = 0, most: int | None = None) -> None:
        """Add waiting requests to a pass of up to ``budget`` more tokens; none that needs more than ``most`` tokens,
        and none behind it."""
        kept, spare, prefixes = [], self._spare_pages(), dict[tuple[bytes, int] | None, Prefix]()
        for i, request in enumerate(self.waiting):
            prefix = None
            if budget and self._takes_another(request, spare, leaving):
                is_new = request.parent is None and request.num_tokens == request.context_length
                # Once pages are lost, those that were found may be another request's.
                key = (request.context_digest, self.pool.num_losses) if is_new else None
                prefix = prefixes.get(key) or self._find_prefix(request)
                # A shorter one may be pending next.
                if is_new and (prefix.is_pending or prefix.length == request.num_tokens - 1):
                    prefixes[key] = prefix
                if prefix.is_pending:
                    kept.append(request)
                    continue
            is_short = prefix is not None and (most is None or request.num_tokens - prefix.length <= most)
            if not is_short or not self._admit(request, prefix, plan):
                kept += self.waiting[i:]
                break
            spare -= len(request.table)
            budget -= self._run_chunk(plan, request, budget)
        self.waiting = kept

    def _spare_pages(self) -> float:
        """Pages that no running request can need."""
        is_sure = len(self.running) + len(self.waiting) <= self._sure_requests
        if self.pool.max_pages is None or not self.waiting or is_sure:
            return math.inf
        missing = sum(len(row.table) - row.num_pages for row in self.running)
        return self.pool.max_pages - self.pool.pages_in_use - missing

    def _takes_another(self, request: Request, spare: float, leaving: int = 0) -> bool:
        count = len(self.running) - leaving
        return count < self._sure_requests or (count < self.max_requests and len(request.table) <= spare)

    @property
    def is_full(self) -> bool:
        """Whether the next waiting request cannot run for the number of those that do."""
        return bool(self.waiting) and not self._takes_another(self.waiting[0], self._spare_pages())

    def complete(self, plan: Pass) -> list[Request]:
        """Record that the pass has run. Returns the rows that get a token from it."""
        for request, count in zip(plan.rows, plan.counts, strict=True):
            self._record_computed(request, count)
        return [request for request in plan.rows if request.num_computed_tokens == request.num_tokens]

    def reserve_pages(self, request: Request, end: int) -> int:
        """Reserve spare pages for the positions before ``end``. Returns the position up to which pages exist."""
        missing = max(0, -(-end // request.page_size) - request.num_pages)
        while missing > 0 and not self.pool.has_room(missing + len(self.running)):
            missing -= 1
        request.add_pages(self.pool.take(missing))
        return min(end, request.num_pages * request.page_size)

    def max_burst_steps(self, requests: list[Request], most: int, ahead: int = 0) -> np.ndarray:
        """Reserve pages for up to ``most`` decoding steps of each running request, which follow ``ahead`` steps that
        are running. Returns the steps, int64 [n]; 0 or less if not even the steps ahead of them have pages."""
        if most + ahead == 1 or not requests:
            return np.ones(len(requests), np.int64)
        limits, num_tokens, num_pages = np.array([(len(r.tokens), r.num_tokens, r.num_pages) for r in requests]).T
        begins = num_tokens - 1 + ahead
        ends = begins + np.minimum(most, limits - num_tokens - ahead)
        missing = np.maximum(-(-ends // self.pool.page_size) - num_pages, 0)
        if self.pool.has_room(int(missing.sum()) + len(self.running)):
            pages = np.array(self.pool.take(int(missing.sum())), np.int64)
            for i, end in zip(np.flatnonzero(missing).tolist(), missing.cumsum()[missing > 0].tolist(), strict=True):
                requests[i].add_pages(pages[end - missing[i] : end])
        else:
            ends = np.array([self.reserve_pages(*pair) for pair in zip(requests, ends.tolist(), strict=True)])
        return ends - begins

    def commit_draft(self, request: Request, accepted: int, runs_on: bool = False) -> None:
        """Keep the first ``accepted`` tokens of a draft or burst that was run, and pages for these alone unless the
        next pass has been launched."""
        self._record_computed(request, accepted)
        if not runs_on and (kept := -(-request.num_computed_tokens // request.page_size)) < request.num_pages:
            self.pool.give_back(request.table[kept : request.num_pages])
            request.num_pages = kept

    def finish(self, *requests: Request) -> None:
        """Finish ``requests``; they keep their pages if they are held."""
        for request in requests:
            self._stop(request)
            if request.generation.hold:
                self._held[request] = self._unnamed[request] = None
        self._drop_pages(*[request for request in requests if not request.generation.hold])

    def release(self, *requests: Request) -> None:
        """Release finished requests: they get no new children, and waiting ones can still reuse their pages."""
        for request in requests:
            request.released = True
        self._drop_pages(*[row for row in requests if row.waiting_children == 0 and row in self._held])

    def _record_computed(self, request: Request, count: int) -> None:
        """Record K and V of the next ``count`` tokens. Pages of tokens sampled since the request began are registered
        after it has ended, as nothing can reuse them before."""
        before = request.num_computed_tokens
        request.num_computed_tokens += count
        if before < request.num_known_tokens:
            self._register(request, before)

    def _register(self, request: Request, before: int) -> None:
        """Register full pages that end after position ``before``, and the end of the context if it does."""
        end, size = request.num_computed_tokens, request.page_size
        full = slice(before // size, end // size)
        digests, pages = request.digests()[full], request.table[full].tolist()
        if before < request.context_length <= end:
            digests.append(request.context_digest)
            pages.append(int(request.table[(request.context_length - 1) // size]))
        self._clear_pending(digests, request)
        self.pool.register(digests, pages)

    def _run_chunk(self, plan: Pass, request: Request, budget: int) -> int:
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        plan.rows.append(request)
        plan.counts.append(count)
        return count

    def _has_page_for_next(self, request: Request) -> bool:
        """Give the running ``request`` a page for its next token if it needs one; False if it was preempted."""
        if not request.is_running:
            return False
        if request.num_computed_tokens < request.num_pages * request.page_size:
            return True
        while not self.pool.has_room(1):
            if not self._evict(with_children=True):
                # The victim was admitted last and comes last in the pass, so no planned row loses its pages.
                victim = next(reversed(self.running))
                self._preempt(victim)
                if victim is request:
                    return False
        request.add_pages(self.pool.take(1))
        return True

    def _admit(self, request: Request, prefix: Prefix, plan: Pass) -> bool:
        """Give ``request`` pages for all its tokens and start it; False if there are not enough pages."""
        full = prefix.length // request.page_size
        pages, partial = prefix.pages[:full], prefix.pages[full:].tolist()
        needed = -(-request.num_tokens // request.page_size) - full
        # Hold the shared pages, so that `_make_room` does not free them.
        self.pool.share(pages)
        if not self._make_room(needed + len(self.running)) or (self.running and any(map(self.pool.is_lost, partial))):
            # Without the partly filled page the request needs more tokens than it was chosen for.
            self.pool.give_back(pages)
            return False
        partial = [page for page in partial if not self.pool.is_lost(page)]
        request.num_computed_tokens = prefix.length if partial else full * request.page_size
        fresh = self.pool.take(needed)
        for page in partial:
            # The source may be the target of a copy in this pass. All copies run at once, so read its origin.
            plan.copies[fresh[0]] = plan.copies.get(page, page)
        request.add_pages(pages)
        request.add_pages(fresh)
        self.pool.expect_no_more(request.expected)
        self._start(request)
        return True

    def _start(self, request: Request) -> None:
        behind = request.num_tokens - request.num_computed_tokens
        if request.was_admitted:
            self.counts["recomputed_tokens"] += behind
        else:
            self.counts["reused_tokens"] += request.num_computed_tokens
            self.counts["prefilled_tokens"] += behind
        is_covered = self._is_covered(request)
        request.was_admitted = request.is_running = True
        request.num_known_tokens = 0 if is_covered else request.num_tokens
        self.running[request] = None
        for digest in [] if is_covered else request.missing(request.num_computed_tokens):
            self._pending.setdefault(digest, request)
        if (parent := request.parent) is not None:
            parent.waiting_children -= 1
            if parent in self._held:
                self._held[parent] = self._held.pop(parent)
            if parent.released:
                self.release(parent)

    def _is_covered(self, request: Request) -> bool:
        """Whether the parent has computed all but the last token of a request that is about to run."""
        parent, limit = request.parent, request.num_tokens - 1
        return parent is not None and 0 < limit <= min(parent.num_computed_tokens, request.common_with_parent)

    def _name_pages(self, *requests: Request) -> None:
        """Register the pages of ``requests``, also those that a released parent has left them without a name."""
        for request in requests:
            begin, size = max(request.num_known_tokens, request.context_length - 1), request.page_size
            while begin >= size and self.pool.find(request.digests()[begin // size - 1]) is None:
                begin -= size
            self._register(request, begin)
            self._unnamed.pop(request, None)

    def _find_prefix(self, request: Request) -> Prefix:
        size, limit, parent = request.page_size, request.num_tokens - 1, request.parent
        if self._is_covered(request):
            return Prefix(parent.table[: -(-limit // size)], limit, False)
        length = 0 if parent is None else min(parent.num_computed_tokens, limit, request.common_with_parent)
        self._name_pages(*self._unnamed)
        pages: list[int] = []
        for digest in request.digests()[: limit // size]:
            page = self.pool.find(digest)
            if page is None:
                break
            pages.append(page)
        pending = list(takewhile(self._pending.__contains__, request.digests()[len(pages) : limit // size]))
        is_pending = len(pending) * size > _SHORT_PREFIX
        length_found = len(pages) * size
        of_context, last_page = min(request.context_length, limit), self.pool.find(request.context_digest)
        if last_page is not None and len(pages) == (request.context_length - 1) // size and of_context > length_found:
            pages.append(last_page)
            length_found = of_context
        prefix = Prefix(np.array(pages, np.int64), length_found, is_pending)
        if length > prefix.length:
            prefix.pages, prefix.length = parent.table[: -(-length // size)], length
        if request.context_digest in self._pending and of_context > prefix.length:
            prefix.is_pending = True
        return prefix

    def _make_room(self, count: int) -> bool:
        while not self.pool.has_room(count):
            # Running requests will free pages. Parents of waiting children are evicted only if nothing runs.
            if not self._evict(with_children=not self.running):
                return False
        return True

    def _evict(self, with_children: bool) -> bool:
        """Evict one held request; False if there is none, or none without waiting children unless ``with_children``."""
        without = (request for request in self._held if request.waiting_children == 0)
        victim = next(without, next(iter(self._held), None) if with_children else None)
        if victim is None:
            return False
        self._name_pages(*self._unnamed)
        self._drop_pages(victim)
        self.counts["evictions"] += 1
        return True

    def _preempt(self, request: Request) -> None:
        self.counts["preemptions"] += 1
        self._name_pages(request)  # others may hold pages of the parent
        self._stop(request)
        self._drop_pages(request)
        self.submit(request)

    def _stop(self, request: Request) -> None:
        del self.running[request]
        request.is_running = False

    def _drop_pages(self, *requests: Request) -> None:
        # Of expected pages, the last ones are the first to go.
        pages = [request.table[: request.num_pages][::-1] for request in requests]
        self.pool.give_back(np.concatenate([*pages, np.zeros(0, np.int64)]))
        for request in requests:
            self._held.pop(request, None)
            self._unnamed.pop(request, None)
            if request.num_computed_tokens < request.num_known_tokens:
                self._clear_pending(request.missing(request.num_computed_tokens), request)
            request.num_pages = request.num_computed_tokens = 0

    def _clear_pending(self, digests: list[bytes], request: Request) -> None:
        for digest in digests:
            if self._pending.get(digest) is request:
                del self._pending[digest]
