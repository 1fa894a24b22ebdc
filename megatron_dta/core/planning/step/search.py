"""Chooses segment size, tokens in flight and recomputed segments of a step on a single stage by predicted time.

None of these choices changes the result of a step. The planner takes the fastest predicted plan that fits the memory of
a rank. With segments of S tokens and a budget of M tokens in flight:

    larger S     fewer launches and fewer reads of the weights, but more activations of the running segment
    larger M     fuller segments, but keys, values and kept activations of more tokens
    recompute    a second forward of some segments (``recompute``), which saves their activations

Pairs of S and M are searched.

Planning one pair (S, M) takes milliseconds, and all planning may take only a small share of the step. The number of
trials therefore follows from the predicted step time. Trials are counted and not timed, so that all ranks choose the
same plan. A trial uses few of the segment planner's strategies; the best pairs are planned again with all of them if
the number of trials allows.

1. Try the sizes from the largest on, each with its most promising budget. Stop when no smaller size can be faster, or
   when several sizes were slower than the best.
2. Try budgets and sizes around the best pair.
3. Plan the best pairs with all strategies.

With limited memory, budgets are between the longest sequence, which every plan needs, and the largest budget that
leaves room for one full segment's activations. The best budget is usually the one with which all activations just fit:
a smaller one makes less full segments, a larger one recomputes more forwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.core.planning.segments.plan import (
    STRATEGIES,
    SegmentPlan,
    default_memory_tokens,
    plan_segments,
    segment_parents,
)
from megatron_dta.core.planning.step.evaluate import StepChoice, evaluate_plan, out_of_memory_error, with_peak
from megatron_dta.core.planning.step.passes import PipelineShape, StepBudget
from megatron_dta.core.tree import PrefixTree

# Segment sizes to try if none is given, and the size to use if costs were not measured.
SIZES = (8192, 6656, 5376, 4352, 3584, 2816, 2048, 1536, 1024, 768, 512, 256)
DEFAULT_SEGMENT_TOKENS = 2048
# Tried first where a segment of half the size takes less time than its launches: small models, slow hosts.
LARGE_SIZES = (32768, 24576, 16384, 12288)
# Without a limit in bytes, larger segments get the default budget of segments of this size.
UNLIMITED_SEGMENT_TOKENS = 2048
# The first phase ends after this many sizes that are slower than the best.
SLOWER_SIZES = 2
# Strategies of the segment planner in one trial, most trials around the best pair, and pairs planned with all of them.
TRIAL_STRATEGIES = 2
NEARBY_TRIALS = 8
FULLY_PLANNED = 2
# Share of a step's predicted time that all trials may take, and the time of one trial: a constant, and the time for
# each token, for each node of the forest and for each segment.
TRIAL_SHARE = 0.012
TRIAL_SECONDS, TRIAL_TOKEN_SECONDS, TRIAL_NODE_SECONDS, TRIAL_SEGMENT_SECONDS = 1e-3, 2e-8, 5e-6, 4e-5
# Planning a pair with all strategies counts as this many trials.
FULL_PLAN_TRIALS = 2
# Relative steps around a pair, and the multiple to which the size step is rounded.
BUDGET_STEP = 1 / 16
SIZE_STEP = 1 / 16
GRANULE = 64
# A merged segment may exceed ``segment_tokens`` by this share. Maximum number of merges, and maximum number of pairs of
# neighbours that are tried for each, shortest segment first.
EXTRA_LENGTH = 1 / 16
MAX_TRIES = 32


def choose_step(
    tree: PrefixTree, loss_masks: Sequence[np.ndarray] | None, shape: PipelineShape, budget: StepBudget
) -> StepChoice:
    """Choose the fastest plan over ``tree``. The choice is deterministic, so all ranks of a replica agree.

    Args:
        loss_masks: see ``segment_counts``.
        shape: cost model and memory of the stage. Bytes are limited only if it has a memory budget.
        budget: fixed values; segment_tokens and memory_tokens are chosen where they are None.

    Raises:
        InputError: no plan fits into the memory (the message says how many bytes are missing), or an argument that
            ``plan_segments`` refuses.
    """
    large = tuple(size for size in LARGE_SIZES if size <= 2 * shape.cost_model.tokens_of_floor)
    sizes = [budget.segment_tokens] if budget.segment_tokens else list(useful_sizes(large + SIZES, tree, shape))
    return StepSearch(tree, loss_masks, shape, budget).choose(sizes)


def useful_sizes(sizes: Sequence[int], tree: PrefixTree, shape: PipelineShape) -> Iterator[int]:
    """The sizes worth trying: of those that hold all tokens in one segment, only the smallest."""
    for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
        if smaller * shape.context_size < tree.num_tokens or not smaller:
            yield size * shape.context_size


@dataclass
class StepSearch:
    """A search over pairs of segment size and budget, with the plans found so far.

    Attributes:
        tree, loss_masks, shape, limits: as in ``choose_step``. If the segment size is free, segments may also be merged
            into slightly longer ones.
        choices: the plan of each tried pair, None if it does not fit.
        trials: number of trials made.
        work: predicted seconds of the last plan without launch times and recomputation.
        missing: bytes that the last plan lacked.
    """

    tree: PrefixTree
    loss_masks: Sequence[np.ndarray] | None
    shape: PipelineShape
    limits: StepBudget
    choices: dict[tuple[int, int], StepChoice | None] = field(default_factory=dict)
    trials: int = 0
    work: float = 0.0
    missing: float = 0.0

    def choose(self, sizes: Sequence[int]) -> StepChoice:
        """Find the fastest plan; raises InputError if none fits into the memory."""
        slower = 0
        floor = self.shape.cost_model.floor_seconds
        for size in sizes:
            best = self._best()
            least = max(self.work, floor * -(-self.tree.num_tokens // size))
            if slower >= SLOWER_SIZES or (best and (best.seconds <= least or self._trials_left() <= FULL_PLAN_TRIALS)):
                break
            bounds = self._budgets(size)
            if bounds is None and size != sizes[-1]:
                continue
            choice = self._try(size, self._likely_budget(size, bounds))
            slower += choice is not None and best is not None and choice.seconds > best.seconds
        if self._best() is not None:
            self._try_nearby()
        return self._plan_fully(sizes[-1])

    def _best(self) -> StepChoice | None:
        """The fastest plan so far."""
        fitting = [choice for choice in self.choices.values() if choice is not None]
        return min(fitting, key=lambda choice: choice.seconds, default=None)

    def _trials_left(self) -> int:
        """Number of further trials that the best plan's predicted time allows."""
        best = self._best()
        trial = TRIAL_SECONDS + TRIAL_TOKEN_SECONDS * self.tree.num_tokens + TRIAL_NODE_SECONDS * self.tree.num_nodes
        trial += TRIAL_SEGMENT_SECONDS * best.segments.num_segments
        return int(TRIAL_SHARE * best.seconds / trial) - self.trials

    @property
    def is_free(self) -> bool:
        """Whether the segment size is free."""
        return self.limits.segment_tokens is None

    @property
    def _longest(self) -> int:
        return int(self.tree.sequence_lengths.max(initial=0))

    def _try(self, size: int, budget: int, strategies: int = TRIAL_STRATEGIES) -> StepChoice | None:
        """Plan a pair; the result is None if it does not fit."""
        self.trials += 1 if strategies == TRIAL_STRATEGIES else FULL_PLAN_TRIALS
        planned = plan_segments(self.tree, size, budget, strategies)
        if self.is_free:
            planned = merge_small_segments(planned, budget)
        choice, self.work, self.missing = evaluate_plan(
            planned, self.loss_masks, self.shape, budget, self.limits.activation_tokens
        )
        before = self.choices.get((size, budget))
        if before is None or (choice is not None and choice.seconds < before.seconds):
            self.choices[size, budget] = choice
        return choice

    def _budgets(self, size: int) -> tuple[int, int] | None:
        """Smallest and largest budget worth trying; None if not even one full segment fits."""
        if self.limits.memory_tokens is not None:
            return self.limits.memory_tokens, self.limits.memory_tokens
        most = default_memory_tokens(self.tree, size)
        if self.shape.memory is None:
            if self.is_free:
                most = default_memory_tokens(self.tree, min(size, UNLIMITED_SEGMENT_TOKENS))
            return most, most
        kept, slot, free = self._bytes(size)
        size = min(size, self.tree.num_tokens)
        most = min(most, int((free - kept * size) // slot))
        # A budget below one segment would allow no full segments.
        return (self._longest, most) if most >= max(self._longest, size) else None

    def _bytes(self, size: int) -> tuple[float, float, float]:
        """Bytes of a token's activations, bytes of its slot and path, and the bytes available for all tokens."""
        layers, sizes = self.shape.layers[0], self.shape.memory.stages[0].segments
        size = min(size, self.tree.num_tokens)
        free = self.shape.memory.available(0) - sizes.fixed - float(sizes.work(size, max(size, self._longest)))
        return sizes.kept(layers), sizes.slot(layers), free

    def _likely_budget(self, size: int, bounds: tuple[int, int] | None) -> int:
        """The largest budget with which all activations fit, clipped to the bounds."""
        if bounds is None:
            return self.limits.memory_tokens or self._longest
        if bounds[0] == bounds[1] or self.shape.memory is None:
            return bounds[1]
        kept, slot, free = self._bytes(size)
        return int(np.clip(free // (kept + slot), *bounds))

    def _try_nearby(self) -> None:
        """Try pairs around the best pair so far."""
        for _ in range(min(NEARBY_TRIALS, self._trials_left() - FULL_PLAN_TRIALS)):
            best = self._best()
            (size, budget) = next(pair for pair, choice in self.choices.items() if choice is best)
            pair = next((pair for pair in self._around(size, budget) if pair not in self.choices), None)
            if pair is None:
                return
            self._try(*pair)

    def _around(self, size: int, budget: int) -> list[tuple[int, int]]:
        """Pairs near this one, most promising first."""
        bounds, pairs = self._budgets(size), []
        if bounds is None:
            return []
        if self.shape.memory is not None and self.limits.memory_tokens is None:
            step = max(1, int(BUDGET_STEP * budget))
            for other in (budget + step, budget - step, budget + 2 * step, bounds[1], bounds[0]):
                pairs.append((size, int(np.clip(other, *bounds))))
        if self.is_free and size > 2 * GRANULE:
            step = max(GRANULE, int(SIZE_STEP * size) // GRANULE * GRANULE)
            for other in (size + step, size - step, size + 2 * step):
                limits = self._budgets(other)
                if limits is not None:
                    pairs.insert(1 if other > size else len(pairs), (other, int(np.clip(budget, *limits))))
        return pairs

    def _plan_fully(self, least_size: int) -> StepChoice:
        """Plan the best pairs with all strategies and return the fastest plan."""
        fitting = [(choice.seconds, pair) for pair, choice in self.choices.items() if choice is not None]
        pairs = [pair for _, pair in sorted(fitting)[:FULLY_PLANNED]]
        for pair in pairs:
            if self._trials_left() >= FULL_PLAN_TRIALS:
                self._try(*pair, strategies=len(STRATEGIES))
        if not pairs:
            self._try(least_size, self.limits.memory_tokens or self._longest, strategies=len(STRATEGIES))
        best = self._best()
        if best is None:
            raise out_of_memory_error(
                self.shape.memory, 0, self.missing, self.tree, least_size, self.limits.memory_tokens
            )
        return with_peak(best, self.shape)


def merge_small_segments(plan: SegmentPlan, memory_tokens: int) -> SegmentPlan:
    """Merge short segments with their neighbours, up to ``1 + EXTRA_LENGTH`` times ``plan.segment_tokens`` tokens.

    Every forward has a minimum time, which the host needs to launch its kernels. Any cut of the stream is a valid plan;
    only the tokens in flight change.

    Args:
        plan: the segments.
        memory_tokens: maximum number of tokens in flight. A plan that already exceeds it may not get more than it has.

    Returns:
        The merged plan. Its ``segment_tokens`` is larger than that of ``plan`` if one of its segments is.
    """
    limit = int(plan.segment_tokens * (1 + EXTRA_LENGTH))
    most = max(memory_tokens, plan.peak_in_flight_tokens)
    for _ in range(MAX_TRIES):
        merged = _merge_one(plan, limit, most)
        if merged is None:
            break
        plan = merged
    longest = int(plan.lengths.max(initial=0))
    if longest <= plan.segment_tokens:
        return plan
    return SegmentPlan(plan.tree, plan.segment_start, plan.segment_parent, longest)


def _merge_one(plan: SegmentPlan, limit: int, most: int) -> SegmentPlan | None:
    """The first merge that fits, by the length of the shorter neighbour; None if none does."""
    lengths = plan.lengths
    fits = np.flatnonzero(lengths[:-1] + lengths[1:] <= limit)
    shorter = np.minimum(lengths[fits], lengths[fits + 1])
    for first in fits[np.argsort(shorter, kind="stable")][:MAX_TRIES].tolist():
        starts = np.delete(plan.segment_start, first + 1)
        merged = SegmentPlan(plan.tree, starts, segment_parents(plan.tree, starts), plan.segment_tokens)
        if merged.peak_in_flight_tokens <= most:
            return merged
    return None
