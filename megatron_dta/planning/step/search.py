"""Searches the segments of a step on a single stage: their size S and the budget M of tokens in flight.

Planning a pair (S, M) takes some milliseconds, and all planning may take a small share of the step, so there are as
many looks at pairs as the predicted seconds allow: counted, not timed, so that all ranks choose the same. A look takes
few of the segment planner's strategies; the best pairs are planned with all, where that is allowed. First come the
sizes from the largest on, each with the budget that seems best for it; the search ends where no smaller segments can be
faster, or some have been slower than the best. Then budgets and sizes around the best pairs.

In a limited memory, budgets lie between the longest sequence, which any plan needs, and what leaves room for one full
segment's activations. The best is mostly where all activations just fit: less cuts segments worse, more makes forwards
run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.planning.segments.cut import STRATEGIES, default_memory_tokens, plan_segments
from megatron_dta.planning.segments.merge_small import merge_small_segments
from megatron_dta.planning.step.evaluate import StepChoice, judge, out_of_memory_error, with_peak
from megatron_dta.planning.step.passes import PipelineShape
from megatron_dta.tree import PrefixTree

# Where memory is not limited in bytes, larger segments may have no more in flight than these by default.
UNLIMITED_SEGMENT_TOKENS = 2048
# After so many sizes that are slower than the best, smaller ones are not tried. A look takes so many of the segment
# planner's strategies; so many more looks are around the best pairs, of which so many are planned with all.
SLOWER_SIZES = 2
LOOKED_AT = 2
MORE_LOOKS = 8
CAREFUL = 2
# Looks may take this share of a step; what one takes at least, for each token, each node of the forest, and each
# segment.
LOOKING_SHARE = 0.012
LOOK_SECONDS, LOOK_TOKEN_SECONDS, LOOK_NODE_SECONDS, LOOK_SEGMENT_SECONDS = 1e-3, 2e-8, 5e-6, 4e-5
# Looks that planning a pair with all strategies takes the time of.
CARE_LOOKS = 2
# Steps around a pair, and the granule of sizes between those that are given.
BUDGET_STEP = 1 / 16
SIZE_STEP = 1 / 16
GRANULE = 64


@dataclass
class StepSearch:
    """The pairs that were planned for a step.

    Attributes:
        tree, loss_masks, shape, activation_tokens: as in ``choose_step``.
        memory_tokens: the only budget, if given.
        is_free: whether sizes may be chosen, and so segments be a little longer.
    """

    tree: PrefixTree
    loss_masks: Sequence[np.ndarray] | None
    shape: PipelineShape
    memory_tokens: int | None
    activation_tokens: int | None
    is_free: bool
    found: dict[tuple[int, int], StepChoice | None] = field(default_factory=dict)
    looks: int = 0
    work: float = 0.0
    missing: float = 0.0

    def choose(self, sizes: Sequence[int]) -> StepChoice:
        """The fastest plan that was found; raises InputError if none fits into the memory."""
        slower = 0
        floor = self.shape.cost_model.floor_seconds
        for size in sizes:
            best = self._best()
            least = max(self.work, floor * -(-self.tree.num_tokens // size))
            if slower >= SLOWER_SIZES or (best and (best.seconds <= least or self._looks_left() <= CARE_LOOKS)):
                break
            bounds = self._budgets(size)
            if bounds is None and size != sizes[-1]:
                continue
            choice = self._look(size, self._likely_budget(size, bounds))
            slower += choice is not None and best is not None and choice.seconds > best.seconds
        if self._best() is not None:
            self._look_around()
        return self._planned_with_care(sizes[-1])

    def _best(self) -> StepChoice | None:
        """The fastest so far."""
        fitting = [choice for choice in self.found.values() if choice is not None]
        return min(fitting, key=lambda choice: choice.seconds, default=None)

    def _looks_left(self) -> int:
        """How many more looks the best plan's seconds allow."""
        best = self._best()
        look = LOOK_SECONDS + LOOK_TOKEN_SECONDS * self.tree.num_tokens + LOOK_NODE_SECONDS * self.tree.num_nodes
        look += LOOK_SEGMENT_SECONDS * best.segments.num_segments
        return int(LOOKING_SHARE * best.seconds / look) - self.looks

    @property
    def _longest(self) -> int:
        return int(self.tree.sequence_lengths.max(initial=0))

    def _look(self, size: int, budget: int, strategies: int = LOOKED_AT) -> StepChoice | None:
        """Plan a pair; None if it does not fit."""
        self.looks += 1 if strategies == LOOKED_AT else CARE_LOOKS
        planned = plan_segments(self.tree, size, budget, strategies)
        if self.is_free:
            planned = merge_small_segments(planned, budget)
        choice, self.work, self.missing = judge(planned, self.loss_masks, self.shape, budget, self.activation_tokens)
        before = self.found.get((size, budget))
        if before is None or (choice is not None and choice.seconds < before.seconds):
            self.found[size, budget] = choice
        return choice

    def _budgets(self, size: int) -> tuple[int, int] | None:
        """Least and most tokens in flight that are worth a look; None if not even one full segment fits."""
        if self.memory_tokens is not None:
            return self.memory_tokens, self.memory_tokens
        most = default_memory_tokens(self.tree, size)
        if self.shape.memory is None:
            if self.is_free:
                most = default_memory_tokens(self.tree, min(size, UNLIMITED_SEGMENT_TOKENS))
            return most, most
        kept, slot, room = self._bytes(size)
        size = min(size, self.tree.num_tokens)
        most = min(most, int((room - kept * size) // slot))
        # With less in flight than a full segment has there would be no full segments.
        return (self._longest, most) if most >= max(self._longest, size) else None

    def _bytes(self, size: int) -> tuple[float, float, float]:
        """Of a token: its activations, and its slot with the room for its path; and what there is for all of them."""
        layers, each = float(sum(self.shape.layers)), self.shape.memory.bytes
        size = min(size, self.tree.num_tokens)
        room = self.shape.memory.available(0) - each.fixed - float(each.work(size, max(size, self._longest)))
        return each.kept(layers), each.slot(layers), room

    def _likely_budget(self, size: int, bounds: tuple[int, int] | None) -> int:
        """The budget with which all activations just fit, within the bounds."""
        if bounds is None:
            return self.memory_tokens or self._longest
        if bounds[0] == bounds[1] or self.shape.memory is None:
            return bounds[1]
        kept, slot, room = self._bytes(size)
        return int(np.clip(room // (kept + slot), *bounds))

    def _look_around(self) -> None:
        """Vary the best pair, always the best so far."""
        for _ in range(min(MORE_LOOKS, self._looks_left() - CARE_LOOKS)):
            best = self._best()
            (size, budget) = next(pair for pair, choice in self.found.items() if choice is best)
            pair = next((pair for pair in self._around(size, budget) if pair not in self.found), None)
            if pair is None:
                return
            self._look(*pair)

    def _around(self, size: int, budget: int) -> list[tuple[int, int]]:
        """Pairs near this one, the most promising first."""
        bounds, pairs = self._budgets(size), []
        if bounds is None:
            return []
        if self.shape.memory is not None and self.memory_tokens is None:
            step = max(1, int(BUDGET_STEP * budget))
            for other in (budget + step, budget - step, budget + 2 * step, bounds[1], bounds[0]):
                pairs.append((size, int(np.clip(other, *bounds))))
        if self.is_free and size > 2 * GRANULE:
            step = max(GRANULE, int(SIZE_STEP * size) // GRANULE * GRANULE)
            for other in (size + step, size - step, size + 2 * step):
                own = self._budgets(other)
                if own is not None:
                    pairs.insert(1 if other > size else len(pairs), (other, int(np.clip(budget, *own))))
        return pairs

    def _planned_with_care(self, least_size: int) -> StepChoice:
        """The best pairs with all strategies."""
        fitting = [(choice.seconds, pair) for pair, choice in self.found.items() if choice is not None]
        pairs = [pair for _, pair in sorted(fitting)[:CAREFUL]]
        for pair in pairs:
            if self._looks_left() >= CARE_LOOKS:
                self._look(*pair, strategies=len(STRATEGIES))
        if not pairs:
            self._look(least_size, self.memory_tokens or self._longest, strategies=len(STRATEGIES))
        best = self._best()
        if best is None:
            raise out_of_memory_error(self.shape.memory, 0, self.missing, self.tree, least_size, self.memory_tokens)
        return with_peak(best, self.shape)
