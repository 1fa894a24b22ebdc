"""Which sequences run in the next pass, and on which pages: continuous batching with shared prefixes.

A sequence has ``known`` tokens (context, then what was sampled) and K/V for the first ``computed`` of them. A pass
appends K/V: one token for a sequence that decodes, a chunk for one that is behind, because it is new or was preempted.
Whoever has all but its last token computed and runs that one gets its next token. Prefill, decoding, a fork and
recomputation are therefore one thing.

*Sharing.* An admitted sequence takes over the pages of the longest prefix that is there: full pages of anybody by their
digest, and those of its parent or of a sequence with the same context, whose partly filled last page is copied. Where
the prefix is just being computed by a running sequence, it waits for that.

*Memory.* A sequence is admitted when there are pages for its known tokens and one more for each running sequence. When
a running one needs a page and none is free, held sequences lose theirs, those last used the longest ago and without
waiting children first; then the sequence admitted last goes back to waiting and is computed again later. One sequence
alone always fits, so all finish.

Decisions follow from the calls alone, so the ranks of a replica take the same ones. No tensors here.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.sampling.engines.in_process.pages import PagePool, extend_digest
from megatron_dta.sampling.engines.interface import GenerationRequest


class Sequence:
    """One request on its way.

    Attributes:
        tokens: int32 [context + max_tokens], the first ``known`` of them are.
        computed: positions whose K and V lie in the first pages of ``table``.
        table: int64, the first ``num_pages`` of it are held.
        logprobs: float64 [max_tokens], of the sampled tokens.
        waiting_children: sequences not yet admitted that have this one as their parent.
    """

    def __init__(self, request: GenerationRequest, arrival: int, page_size: int, parent: Sequence | None) -> None:
        context = np.asarray(request.token_ids, dtype=np.int32)
        self.request, self.arrival, self.page_size, self.parent = request, arrival, page_size, parent
        self.tokens = np.concatenate([context, np.zeros(request.max_tokens, dtype=np.int32)])
        self.logprobs = np.zeros(request.max_tokens)
        self.context_length = self.known = len(context)
        self.computed = self.num_pages = self.waiting_children = 0
        self.table = np.zeros(-(-len(self.tokens) // page_size), dtype=np.int64)
        self.common_with_parent = 0 if parent is None else common_prefix(parent.tokens[: parent.known], context)
        # A long context is mostly its parent's: only what is new needs to be hashed.
        self._digests = [] if parent is None else parent.digests()[: self.common_with_parent // page_size]
        full = self.digests()
        self.context_digest = extend_digest((full[-1] if full else b"") + b"context", context[len(full) * page_size :])
        self.is_running = self.was_admitted = self.released = False

    @property
    def pages(self) -> list[int]:
        """The pages it holds."""
        return self.table[: self.num_pages].tolist()

    @property
    def response(self) -> np.ndarray:
        """Tokens sampled so far."""
        return self.tokens[self.context_length : self.known]

    def digests(self) -> list[bytes]:
        """Digest of the prefix up to the end of each page that the known tokens fill."""
        size = self.page_size
        while (len(self._digests) + 1) * size <= self.known:
            first = len(self._digests) * size
            previous = self._digests[-1] if self._digests else b""
            self._digests.append(extend_digest(previous, self.tokens[first : first + size]))
        return self._digests

    def extend(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Take sampled tokens, one after the other."""
        done, end = self.known - self.context_length, self.known + len(tokens)
        self.logprobs[done : done + len(tokens)] = logprobs
        self.tokens[self.known : end] = tokens
        self.known = end

    def add_pages(self, pages: list[int]) -> None:
        """Hold further pages at the end of the table."""
        self.table[self.num_pages : self.num_pages + len(pages)] = pages
        self.num_pages += len(pages)


@dataclass
class Pass:
    """One forward pass: copy the pages of ``copies`` (source, target), then run ``counts[i]`` tokens of ``rows[i]``."""

    rows: list[Sequence] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _Prefix:
    """What is there of a sequence's tokens: full pages, maybe a page to copy from, and how many tokens that is."""

    pages: list[int]
    partial_page: int | None
    length: int
    is_coming: bool  # a running sequence is about to have more of it


class Scheduler:
    """Decides on every pass.

    Args:
        pool: the pages.
        max_requests: most sequences that run at once.
        max_tokens: most tokens of one pass.

    Attributes:
        running: in the order of their admission.
        waiting: in the order of their arrival.
        counts: prefilled_tokens, reused_tokens, recomputed_tokens, preemptions, evictions.
    """

    def __init__(self, pool: PagePool, max_requests: int, max_tokens: int) -> None:
        self.pool, self.max_requests, self.max_tokens = pool, max_requests, max_tokens
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.counts = dict.fromkeys(
            ("prefilled_tokens", "reused_tokens", "recomputed_tokens", "preemptions", "evictions"), 0
        )
        # Finished sequences with pages, the one used last at the end.
        self._held: OrderedDict[Sequence, None] = OrderedDict()
        # Running and held sequences with pages by their context; running ones by the pages they are about to compute.
        self._by_context: dict[bytes, list[Sequence]] = {}
        self._coming: dict[bytes, Sequence] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.running and not self.waiting

    @property
    def num_held(self) -> int:
        """Finished sequences that hold pages."""
        return len(self._held)

    def submit(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._wait(sequence)

    def next_pass(self) -> Pass:
        """What to run now; at least one row unless idle."""
        plan, budget, preemptions = Pass(), self.max_tokens, self.counts["preemptions"]
        for sequence in list(self.running):
            if budget and sequence.known - sequence.computed == 1 and self._has_page_for_next(sequence):
                plan.rows.append(sequence)
                plan.counts.append(1)
                budget -= 1
        for sequence in self.running:
            if budget and sequence.known - sequence.computed > 1:
                budget -= self._run_chunk(plan, sequence, budget)
        index = 0
        # Not right after a preemption: the pages that it freed are for those that run.
        while self.counts["preemptions"] == preemptions and budget and index < len(self.waiting):
            if len(self.running) >= self.max_requests:
                break
            sequence = self.waiting[index]
            prefix = self._find_prefix(sequence)
            if prefix.is_coming:
                index += 1
            elif self._admit(sequence, prefix, plan):
                del self.waiting[index]
                budget -= self._run_chunk(plan, sequence, budget)
            else:
                break
        if not plan.rows and not self.is_idle and self.counts["preemptions"] == preemptions:
            raise AssertionError("no sequence can run: the pool is smaller than was checked")
        return plan if plan.rows or self.is_idle else self.next_pass()

    def complete(self, plan: Pass) -> list[Sequence]:
        """The pass has run: its K and V are there. Returns the rows that get a token now."""
        for sequence, count in zip(plan.rows, plan.counts, strict=True):
            self._has_computed(sequence, count)
        return [sequence for sequence in plan.rows if sequence.computed == sequence.known]

    def reserve_pages(self, sequence: Sequence, end: int) -> int:
        """Give a running sequence pages for positions before ``end``, as far as there are some that nobody needs now;
        before which position it has pages."""
        size = sequence.page_size
        missing = -(-end // size) - sequence.num_pages
        if missing <= 0:
            return end
        while missing > 0 and not self.pool.has_room(missing + len(self.running)):
            missing -= 1
        if missing > 0:
            sequence.add_pages(self.pool.take(missing))
        return min(end, sequence.num_pages * size)

    def max_burst_steps(self, sequences: list[Sequence], most: int) -> np.ndarray:
        """How many tokens each of these running sequences can get one after the other, int64: as many as it may have,
        ``most``, and as far as there are pages, which it is given."""
        steps = np.ones(len(sequences), np.int64)
        for i, sequence in enumerate(sequences):
            wanted = min(most, len(sequence.tokens) - sequence.known)
            if wanted > 1 and sequence.computed + wanted <= sequence.num_pages * sequence.page_size:
                steps[i] = wanted
            elif wanted > 1:
                steps[i] = self.reserve_pages(sequence, sequence.computed + wanted) - sequence.computed
        return steps

    def commit_draft(self, sequence: Sequence, accepted: int) -> None:
        """Of what was run beyond ``computed`` the first ``accepted`` tokens were right; pages for more are free."""
        self._has_computed(sequence, accepted)
        kept = -(-sequence.computed // sequence.page_size)
        if kept == sequence.num_pages:
            return
        self.pool.give_back(sequence.table[kept : sequence.num_pages].tolist())
        sequence.num_pages = kept

    def finish(self, sequence: Sequence) -> None:
        """``sequence`` needs no further token; it keeps its pages if it is to be held."""
        self._stop(sequence)
        if sequence.request.hold:
            self._held[sequence] = None
        else:
            self._drop_pages(sequence)

    def release(self, sequence: Sequence) -> None:
        """Nobody will name this finished sequence as a parent again; children that wait still find its pages."""
        sequence.released = True
        if sequence.waiting_children == 0 and sequence in self._held:
            del self._held[sequence]
            self._drop_pages(sequence)

    def _has_computed(self, sequence: Sequence, count: int) -> None:
        """K and V of the next ``count`` known tokens are there: others may share the pages that they fill."""
        first, last = sequence.computed // sequence.page_size, (sequence.computed + count) // sequence.page_size
        sequence.computed += count
        if first == last:
            return
        digests = sequence.digests()
        for i in range(first, last):
            self._not_coming(digests[i], sequence)
            self.pool.register(digests[i], int(sequence.table[i]))

    def _wait(self, sequence: Sequence) -> None:
        if sequence.parent is not None:
            sequence.parent.waiting_children += 1
        bisect.insort(self.waiting, sequence, key=lambda waiting: waiting.arrival)

    def _run_chunk(self, plan: Pass, sequence: Sequence, budget: int) -> int:
        count = min(sequence.known - sequence.computed, budget)
        plan.rows.append(sequence)
        plan.counts.append(count)
        return count

    def _has_page_for_next(self, sequence: Sequence) -> bool:
        """Give the running ``sequence`` a page for its next token if it needs one; False if it was preempted itself."""
        if not sequence.is_running:
            return False
        if sequence.computed < sequence.num_pages * sequence.page_size:
            return True
        while not self.pool.has_room(1):
            if not self._evict(with_children=True):
                # Those admitted last come last in a pass, so no row that is planned already loses its pages.
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False
        sequence.add_pages(self.pool.take(1))
        return True

    def _admit(self, sequence: Sequence, prefix: _Prefix, plan: Pass) -> bool:
        """Give ``sequence`` pages for all its known tokens; False if there are not enough."""
        pages, partial, computed = prefix.pages, prefix.partial_page, prefix.length
        needed = -(-sequence.known // sequence.page_size) - len(pages)
        # Held meanwhile, so that making room does not free what is to be shared.
        self.pool.share(pages)
        self.pool.share([] if partial is None else [partial])
        has_room = self._make_room(needed + len(self.running))
        if partial is not None:
            self.pool.give_back([partial])
            if not has_room and not self.running:
                # Alone it must fit: without its source's last page it does.
                partial, computed = None, len(pages) * sequence.page_size
                has_room = self._make_room(needed)
        if not has_room:
            self.pool.give_back(pages)
            return False
        fresh = self.pool.take(needed)
        if partial is not None:
            # The source may be filled by a copy of this very pass, and all are made at once.
            origin = next((source for source, target in plan.copies if target == partial), partial)
            plan.copies.append((origin, fresh[0]))
        sequence.add_pages(pages + fresh)
        sequence.computed = computed
        self._start(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        behind = sequence.known - sequence.computed
        if sequence.was_admitted:
            self.counts["recomputed_tokens"] += behind
        else:
            self.counts["reused_tokens"] += sequence.computed
            self.counts["prefilled_tokens"] += behind
        sequence.was_admitted = sequence.is_running = True
        self.running.append(sequence)
        self._by_context.setdefault(sequence.context_digest, []).append(sequence)
        for digest in sequence.digests()[sequence.computed // sequence.page_size :]:
            self._coming.setdefault(digest, sequence)
        parent = sequence.parent
        if parent is not None:
            parent.waiting_children -= 1
            if parent in self._held:
                self._held.move_to_end(parent)
            if parent.released:
                self.release(parent)

    def _find_prefix(self, sequence: Sequence) -> _Prefix:
        size, limit = sequence.page_size, sequence.known - 1
        pages: list[int] = []
        for digest in sequence.digests()[: limit // size]:
            page = self.pool.find(digest)
            if page is None:
                break
            pages.append(page)
        prefix = _Prefix(pages, None, len(pages) * size, False)
        if len(pages) < limit // size:
            prefix.is_coming = sequence.digests()[len(pages)] in self._coming
        # Later ones with the same context started when the first had computed it.
        same_context = self._by_context.get(sequence.context_digest, [])[:1]
        sources = [(other, sequence.context_length) for other in same_context]
        if sequence.parent is not None and sequence.parent.num_pages:
            sources.append((sequence.parent, sequence.common_with_parent))
        coming = 0
        for other, common in sources:
            length = min(common, limit, other.computed)
            if other.is_running:
                coming = max(coming, min(common, limit))
            if length > prefix.length:
                prefix.pages = other.pages[: length // size]
                prefix.partial_page = int(other.table[length // size]) if length % size else None
                prefix.length = length
        prefix.is_coming = prefix.is_coming or coming > prefix.length
        return prefix

    def _make_room(self, count: int) -> bool:
        while not self.pool.has_room(count):
            # Those that run will finish and leave room; what waiting children need is taken only for lack of that.
            if not self._evict(with_children=not self.running):
                return False
        return True

    def _evict(self, with_children: bool) -> bool:
        """Take the pages of one held sequence; False if there is none, or only such as have waiting children."""
        victim = next((sequence for sequence in self._held if sequence.waiting_children == 0), None)
        if victim is None and with_children:
            victim = next(iter(self._held), None)
        if victim is None:
            return False
        del self._held[victim]
        self._drop_pages(victim)
        self.counts["evictions"] += 1
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counts["preemptions"] += 1
        self._stop(sequence)
        self._drop_pages(sequence)
        self._wait(sequence)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.is_running = False

    def _drop_pages(self, sequence: Sequence) -> None:
        same_context = self._by_context[sequence.context_digest]
        same_context.remove(sequence)
        if not same_context:
            del self._by_context[sequence.context_digest]
        for digest in sequence.digests()[sequence.computed // sequence.page_size :]:
            self._not_coming(digest, sequence)
        self.pool.give_back(sequence.pages)
        sequence.num_pages = sequence.computed = 0

    def _not_coming(self, digest: bytes, sequence: Sequence) -> None:
        if self._coming.get(digest) is sequence:
            del self._coming[digest]


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest prefix that both have."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if differing.size else length
