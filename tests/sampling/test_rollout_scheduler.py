"""The in-process engine's scheduler without a model: a store remembers for which prefix each slot was written.

Thousands of requests over a vocabulary of two tokens, so that prefixes coincide by accident too. At every pass every
position that a row attends to must hold the row's own prefix, no row may write into a page that another one holds, and
the pool must count exactly what the tables say.
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.in_process.bursts import Drawn
from megatron_dta.sampling.in_process.drafting import guesses_of
from megatron_dta.sampling.in_process.pages import PagePool
from megatron_dta.sampling.in_process.request import Request
from megatron_dta.sampling.in_process.scheduler import Pass, Scheduler
from megatron_dta.sampling.interface import GenerationRequest


class Store:
    """What a device would hold: of each slot, the prefix whose K and V were written there."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._slots: dict[tuple[int, int], bytes] = {}

    def run(self, plan: Pass, pool: PagePool) -> None:
        pairs = [((target, i), (source, i)) for target, source in plan.copies.items() for i in range(self._size)]
        self._slots.update([(target, self._slots.get(source)) for target, source in pairs])
        assert all(source != target for target, source in pairs)
        for row, count in zip(plan.rows, plan.counts, strict=True):
            assert count >= 1
            for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
                page = int(row.table[position // self._size])
                assert position // self._size < row.num_pages
                assert pool._holders[page] == 1
                self._slots[page, position % self._size] = row.tokens[: position + 1].tobytes()
        for row, count in zip(plan.rows, plan.counts, strict=True):
            for position in range(row.num_computed_tokens + count):
                page = int(row.table[position // self._size])
                assert self._slots[page, position % self._size] == row.tokens[: position + 1].tobytes()

    def run_draft(self, row: Request, draft: np.ndarray, pool: PagePool) -> None:
        """Write what belongs to guesses behind the row's tokens."""
        guessed = np.concatenate([row.tokens[: row.num_tokens], draft])
        for position in range(row.num_tokens, len(guessed)):
            page = int(row.table[position // self._size])
            assert position // self._size < row.num_pages
            assert pool._holders[page] == 1
            self._slots[page, position % self._size] = guessed[: position + 1].tobytes()


def check_pages(pool: PagePool, scheduler: Scheduler, sequences: list[Request]) -> None:
    tables = [sequence.table[: sequence.num_pages] for sequence in sequences if sequence.num_pages]
    held = np.bincount(np.concatenate([np.zeros(0, int), *tables]), minlength=pool.num_pages)
    assert held.tolist() == list(pool._holders[: pool.num_pages])
    assert pool.pages_in_use == np.count_nonzero(held)
    assert pool.max_pages is None or pool.num_pages <= pool.max_pages
    assert len(scheduler.running) <= scheduler.max_requests
    assert all(sequence.num_pages == 0 for sequence in scheduler.waiting)


# Page size, pages (None: no bound), rows, tokens of a pass.
CASES = [
    (4, None, 9, 40),
    (4, 12, 9, 40),
    (1, 30, 5, 7),
    (3, 10, 1, 1),
    (7, 9, 30, 100),
    (16, 4, 6, 5),
    (2, 60, 40, 64),
]


def run_drafts(rng: np.random.Generator, scheduler: Scheduler, store: Store, plan: Pass) -> dict[Request, np.ndarray]:
    """Drafted tokens for the rows that get a token now, with the K and V of the drafts."""
    drafts = {}
    for row, count in zip(plan.rows, plan.counts, strict=True):
        most = min(9, len(row.tokens) - row.num_tokens - 1)
        if row.num_computed_tokens + count < row.num_tokens or most < 1 or rng.random() < 0.3:
            continue
        before = row.num_pages
        end = scheduler.reserve_pages(row, row.num_tokens + int(rng.integers(1, most + 1)))
        # Pages for guesses are never those that running rows need for their next token.
        assert row.num_pages == before or scheduler.pool.has_room(len(scheduler.running))
        drafts[row] = rng.integers(0, 2, end - row.num_tokens).astype(np.int32)
        store.run_draft(row, drafts[row], scheduler.pool)
    return drafts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("seed", "is_drafted"), [(0, False), (3, True)])
def test_every_row_attends_to_its_own_prefix(case: tuple, seed: int, is_drafted: bool):
    size, pages, rows, tokens = case
    rng = seed_all(1000 * seed + size)
    rejected = 0
    pool = PagePool(size, pages)
    scheduler, store = Scheduler(pool, rows, tokens), Store(size)
    longest = size * pages if pages is not None else 60
    everything: list[Request] = []
    held: list[Request] = []
    open_requests, finished = 300, 0
    while open_requests or not scheduler.is_idle:
        for _ in range(int(rng.integers(0, 6)) if open_requests else 0):
            sequence = new_sequence(rng, len(everything), size, longest, held)
            everything.append(sequence)
            scheduler.submit(sequence)
            open_requests = max(0, open_requests - 1)
        if scheduler.is_idle:
            continue
        plan = scheduler.next_pass()
        assert plan.rows
        assert sum(plan.counts) <= tokens
        assert len(set(plan.rows)) == len(plan.rows)
        check_pages(pool, scheduler, everything)
        store.run(plan, pool)
        drafts = run_drafts(rng, scheduler, store, plan) if is_drafted else {}
        for sequence in scheduler.complete(plan):
            draft = drafts.get(sequence, np.zeros(0, np.int32))
            sampled = rng.integers(0, 2, len(draft) + 1)
            accepted = int((sampled[:-1] == draft).cumprod().sum())
            sequence.extend(sampled[: accepted + 1], np.zeros(accepted + 1))
            if len(draft):
                scheduler.commit_draft(sequence, accepted)
                rejected += len(draft) - accepted
                assert sequence.num_computed_tokens == sequence.num_tokens - 1
                # Pages that only rejected guesses have used are free again.
                assert sequence.num_pages == -(-sequence.num_computed_tokens // size)
            if sequence.num_tokens == len(sequence.tokens) or rng.random() < 0.2:
                scheduler.finish(sequence)
                finished += 1
                if sequence.generation.hold:
                    held.append(sequence)
        if held and rng.random() < 0.3:
            scheduler.release(held.pop(int(rng.integers(len(held)))))
        check_pages(pool, scheduler, everything)
    assert finished == len(everything) >= 300
    assert rejected > 20 or not is_drafted
    counts = scheduler.counts
    assert counts["prefilled_tokens"] + counts["reused_tokens"] == sum(s.context_length for s in everything)
    if pages is None:
        assert counts["preemptions"] == counts["evictions"] == counts["recomputed_tokens"] == 0
        assert counts["reused_tokens"] > counts["prefilled_tokens"] / 2
    for sequence in held:
        scheduler.release(sequence)
    assert pool.pages_in_use == scheduler.num_held == 0
    pool.clear()


def new_sequence(rng: np.random.Generator, index: int, size: int, longest: int, held: list[Request]) -> Request:
    """A new prompt, a held sequence continued or cut somewhere, sometimes with the right parent named."""
    parent = held[int(rng.integers(len(held)))] if held and rng.random() < 0.7 else None
    context = rng.integers(0, 2, int(rng.integers(1, max(2, longest // 2)))).astype(np.int32)
    if parent is not None:
        cut = int(rng.integers(1, parent.num_tokens + 1)) if rng.random() < 0.4 else parent.num_tokens
        more = rng.integers(0, 2, int(rng.choice([0, 0, 1, 5]))).astype(np.int32)
        context = np.concatenate([parent.tokens[:cut], more])
    context = context[: longest - 1]
    most = int(rng.integers(1, min(12, longest - len(context)) + 1))
    request = GenerationRequest(index, context, most, 0, hold=bool(rng.random() < 0.5))
    return Request(request, index, size, parent if rng.random() < 0.7 else None)


def test_the_small_pools_did_preempt_and_evict():
    """The cases above would say nothing of preemption if the pools were large enough."""
    rng, pool = seed_all(5), PagePool(4, 12)
    scheduler = Scheduler(pool, 9, 40)
    for index, context in enumerate(rng.integers(0, 50, (40, 9))):
        scheduler.submit(Request(GenerationRequest(index, context, 24, 0, hold=index % 2 == 0), index, 4, None))
    rows = [plan.rows[i] for plan in passes_of(scheduler) for i in plan.ready if plan.rows[i].num_tokens == 9 + 23]
    order = [row.generation.request_id for row in rows]
    assert scheduler.counts["preemptions"] > 5
    assert scheduler.counts["evictions"] > 5
    assert pool.peak_pages == 12
    # Who came first is finished first: preemption takes from the latest.
    assert np.abs(np.array(order) - np.arange(40)).max() <= 9


def test_a_prompt_is_computed_once_for_all_samples_at_once():
    scheduler, context = Scheduler(PagePool(4), 100, 50), np.arange(70)
    # Another prompt begins with the same 40 tokens: it waits for those, not for the others' last.
    submit_all(scheduler, [context] * 20 + [np.append(context[:40], [99] * 5)], 2)
    passes = [sorted(plan.counts, reverse=True) for plan in passes_of(scheduler)]
    assert passes[:2] == [[50], [20, 5]]
    assert scheduler.counts["prefilled_tokens"] == 70 + 19 + 5
    assert scheduler.counts["reused_tokens"] == 19 * 69 + 40


@pytest.mark.parametrize(("shared", "passes"), [(68, [[70], [5] + [1] * 4]), (64, [[70, 69], [1] * 5])])
def test_only_a_long_common_part_is_waited_for(shared: int, passes: list[list[int]]):
    scheduler, context = Scheduler(PagePool(4), 100, 200), np.arange(70, dtype=np.int32)
    submit_all(scheduler, [context] * 4 + [np.append(context[:shared], [99] * 5)], 2)
    assert [sorted(plan.counts, reverse=True) for plan in passes_of(scheduler)][:2] == passes


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize(("rows", "passes"), [(100, 3), (3, 5), (1, 11)])
def test_a_prompt_outlives_its_first_sample(rows: int, passes: int, length: int):
    """Samples end in the pass that computes their prompt, at their first token or at the end of a draft; so do those of
    another prompt with the same start."""
    pool, context = PagePool(4), np.arange(70)
    scheduler = Scheduler(pool, rows, 50)
    submit_all(scheduler, [context] * 8 + [np.append(context[:40], [99 + i] * 5) for i in range(2)], length)
    assert run_all(scheduler) == passes
    assert scheduler.counts["prefilled_tokens"] == 70 + 7 + 2 * 5
    assert pool.pages_in_use == 0
    assert pool.has_room(64)
    assert pool.num_pages == 64  # nothing is kept any more


def test_a_phase_like_the_last_one_grows_the_pool_once():
    """Its pages are those that were asked for at the peak, with one for each running row, and an eighth more."""
    pool = PagePool(4)
    for phase in range(3):
        submit_all(scheduler := Scheduler(pool, 300, 4000), [np.arange(30)] * 200, 40 + phase)
        sizes = {pool.num_pages for _ in passes_of(scheduler)}
        assert (len(sizes) == 1) == (phase > 0)
        pool.clear()
    assert max(sizes) < 1.4 * pool.peak_pages


def test_pages_kept_for_waiting_samples_give_way():
    """A pool of one prompt's pages serves prompts in turn, whatever waits for those that have ended."""
    scheduler = Scheduler(PagePool(4, 5), 1, 50)
    submit_all(scheduler, [np.arange(16), np.arange(100, 116)] * 3, 1)
    run_all(scheduler)
    assert scheduler.counts["evictions"] == scheduler.counts["preemptions"] == 0
    assert scheduler.pool.peak_pages == 4


def test_a_page_that_was_found_for_a_sample_may_go_to_another_request():
    """It is admitted between two samples of a prompt and copies the end of its own to where the prompt's end was."""
    scheduler, store = Scheduler(PagePool(4, 7), 20, 400), Store(4)
    prompt, other = np.arange(6), np.arange(200, 206)
    for contexts in ([prompt], [np.arange(100, 104)], [other], [prompt, other, prompt]):
        submit_all(scheduler, contexts, 1, hold=len(contexts) == 1)
        for plan in passes_of(scheduler):
            store.run(plan, scheduler.pool)
    assert scheduler.counts["evictions"] > 0


def test_a_request_admitted_ahead_computes_one_token():
    """A pool so short that the page which its prefix ends in gives way to it; then it waits for the next pass."""
    scheduler = Scheduler(PagePool(4, 4), 5, 50)
    for index, length in enumerate((4, 6, 6)):
        submit_all(scheduler, [np.arange(length) + length], 2, hold=True)
        if index < 2:
            scheduler.complete(scheduler.next_pass())
    scheduler.finish(next(reversed(scheduler.running)))
    assert scheduler.admit_ahead(0, 50) is None
    assert scheduler.counts["evictions"] == 1
    assert 2 in scheduler.next_pass().counts


@pytest.mark.parametrize(("max_pages", "recomputed"), [(None, 0), (24, 6)])
def test_children_share_pages_of_a_released_parent(max_pages: int | None, recomputed: int):
    """A preempted child finds them with its siblings, and so does a request without a parent."""
    scheduler = Scheduler(PagePool(4, max_pages), 10, 100)
    scheduler.submit(parent := Request(GenerationRequest(0, np.arange(8), 16, 0, hold=True), 0, 4, None))
    assert len(list(passes_of(scheduler))) == 16
    for index in (1, 2, 3):
        request = GenerationRequest(index, parent.tokens, 36, 0, hold=True)
        scheduler.submit(Request(request, index, 4, parent))
    passes = passes_of(scheduler)
    next(passes)
    scheduler.release(parent)
    assert len(list(passes)) >= 35
    scheduler.submit(Request(GenerationRequest(4, parent.tokens, 1, 0), 4, 4, None))
    run_all(scheduler)
    assert scheduler.counts["prefilled_tokens"] == 8 + 4
    assert scheduler.counts["recomputed_tokens"] <= recomputed
    assert (scheduler.counts["preemptions"] > 0) == (recomputed > 0)


def test_rows_keep_what_a_loop_keeps():
    rng, row = seed_all(2), SimpleNamespace(detector=None)
    for case in range(200):
        counts, limits, ends = rng.integers(1, 6, 4), rng.integers(1, 7, 4), {0} if case % 2 else set()
        tokens = rng.integers(0, 3, counts.sum())
        drafts = [rng.integers(0, 3, n - 1) for n in counts] if case % 3 else None
        guesses = None if drafts is None else guesses_of(drafts)
        kept = zip(*Drawn([row] * 4, tokens, tokens, counts, guesses).keep(limits, ends), strict=True)
        for i, of_row in enumerate(np.split(tokens, counts.cumsum()[:-1])):
            for count, token in enumerate(of_row.tolist(), 1):
                is_end = token in ends or count == limits[i]
                if is_end or (drafts is not None and [token] != drafts[i][count - 1 : count].tolist()):
                    break
            assert next(kept) == (count, is_end)


def submit_all(scheduler: Scheduler, contexts: Iterable[np.ndarray], most: int, hold: bool = False) -> None:
    """Submit a request for each context, without a parent, on pages of four tokens."""
    for i, context in enumerate(contexts):
        scheduler.submit(Request(GenerationRequest(i, context, most, 0, hold=hold), i, 4, None))


def passes_of(scheduler: Scheduler) -> Iterator[Pass]:
    """Plans of passes, which then run, until all requests have their length."""
    while not scheduler.is_idle:
        yield (plan := scheduler.next_pass())
        for row in scheduler.complete(plan):
            row.extend(np.ones(1, np.int32), np.zeros(1))
            if row.num_tokens == len(row.tokens):
                scheduler.finish(row)


def run_all(scheduler: Scheduler) -> int:
    """Number of passes until all requests have ended, each in the pass of its first token, longer ones by a draft."""
    passes = 0
    while not scheduler.is_idle:
        passes += 1
        plan = scheduler.next_pass()
        for sequence in [plan.rows[i] for i in plan.ready]:
            end = len(sequence.tokens) - 1
            assert scheduler.reserve_pages(sequence, end) == end
        for sequence in scheduler.complete(plan):
            drafted = len(sequence.tokens) - sequence.num_tokens - 1
            sequence.extend(np.ones(drafted + 1, np.int32), np.zeros(drafted + 1))
            scheduler.commit_draft(sequence, drafted)
            scheduler.finish(sequence)
    return passes


@pytest.mark.parametrize(("max_pages", "most"), [(None, 12), (48, 12), (30, 7), (8, 4)])
def test_more_requests_run_where_all_surely_fit(max_pages: int | None, most: int):
    """Each may grow to 4 pages. Beyond 4 of them only as many run as pages allow, and none is ever preempted for it."""
    scheduler = Scheduler(PagePool(4, max_pages), 12, 200, sure_requests=4)
    submit_all(scheduler, np.arange(6) + 50 * np.arange(20)[:, None], 10)
    live = 0
    for _ in passes_of(scheduler):
        live = max(live, len(scheduler.running))
        assert scheduler.is_full == (len(scheduler.running) >= most and bool(scheduler.waiting)) or max_pages == 8
    assert live == most if max_pages != 8 else live <= most
    assert (scheduler.counts["preemptions"] > 0) == (max_pages == 8)
