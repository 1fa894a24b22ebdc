"""Cuts a prefix forest into segments in one depth-first walk.

Before each child the walk makes two choices: which child comes next, and whether to close the current segment first.
Two invariants keep every later choice feasible:

1. Memory: a subtree starts only if its height fits into the *headroom*, the budget minus the tokens in flight.
2. Children: a segment that contains the end of a branch is closed while the branch's other children still fit behind
   it, because all of that segment stays in flight until they are done.

A segment may continue across a subtree boundary. That fills it, but keeps the previous subtree's path in memory until
the new subtree is done (the extra tokens in flight). Closing the segment instead wastes its free room, and the next
child starts with only its ancestors' segments in flight. ``_crossing_cost`` weighs the two. Subtrees whose tokens all
fit into the headroom can be placed contiguously: their shape does not matter, and they fill segment after segment. A
run of such subtrees is chosen to end near the end of a segment (``branches.longest_within``).

Example: branch A has 3 tokens and two children, B with 4 tokens and C with 2 tokens; a segment holds at most 4 tokens.
A budget below 7 is impossible, because the path A, B has 7 tokens. ``plan_segments`` returns these segments:

    budget  segments                              tokens in flight
    7       [A0 A1 A2] [B0 B1 B2 B3] [C0 C1]      3, 7, 5
    8       [A0 A1 A2 B0] [B1 B2 B3] [C0 C1]      4, 7, 6
    9       [A0 A1 A2 B0] [B1 B2 B3 C0] [C1]      4, 8, 9

With a budget of 7, adding B0 to A's segment would leave a headroom of 3 tokens for the rest of B and for C, less than
one segment, so the walk closes the segment after A. With 8 the headroom left is 4, so it adds B0. C0 does not join the
second segment, because C1 would then run with 9 tokens in flight. With 9 that fits: the second segment crosses the
boundary from B to C, and only the last segment is short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_dta.core.planning.segments.branches import Branches, Run, Siblings, least_wasteful, longest_within


@dataclass(frozen=True)
class Strategy:
    """Parameters of a walk. No setting is best for all forests, so the planner tries several.

    Attributes:
        waste_per_end: expected waste at the end of a run, as a share of a segment.
        tallest_first: order of the subtrees that cannot be placed contiguously: by height if true, else by memory
            pressure.
        tolerance: largest waste with which a run may close its last segment, as a share of a segment.
        early_share: the last run of a subtree ends early if that wastes less than this share of the waste at its
            regular end.
    """

    waste_per_end: float
    tallest_first: bool
    tolerance: float
    early_share: float


@dataclass
class WalkResult:
    """Result of a walk.

    Attributes:
        lengths: number of tokens in each segment.
        in_flight: number of tokens in each segment and its ancestors.
        order: branches in the order of placement. A subtree placed whole in one segment is listed by its first branch.
        with_subtree: for each entry of ``order``, whether the whole subtree was placed with it.
        steps: number of choices, a deterministic measure of the walk's time.
    """

    lengths: list[int]
    in_flight: list[int]
    order: list[int]
    with_subtree: list[bool]
    steps: int


class MemoryPressure:
    """Estimates how much room each subtree wastes per token of headroom that it loses, for one budget.

    Costs are in tokens of wasted room. With headroom H, a run must end about every H tokens, and each end wastes a
    share w (``Strategy.waste_per_end``) of a segment of S tokens. So T tokens waste w T S / H, and losing D tokens of
    headroom costs another w T S D / (H (H - D)). Below H = S the segments are cut short, at S / H segments for one.
    The pressure of a subtree is the sum of T S / H^2 over its branch points, each with the headroom that it has when
    only its own path is in flight.
    """

    def __init__(self, branches: Branches, segment_tokens: int, budget: int) -> None:
        size, height = branches.size, branches.height
        #: headroom at the end of each branch, and above the roots, when only its own path is in flight
        self.headroom = [max(budget - depth, segment_tokens) for depth in branches.depth]
        #: pressure of the branch points inside each subtree; zero for a subtree that fits into one segment
        self.inside = [0.0] * (len(branches) + 1)
        #: ``inside`` plus the child's own tokens, which count at its parent's branch point
        self.as_child = [0.0] * len(branches)
        for branch in range(len(branches), -1, -1):
            children = branches.children[branch]
            per_token = segment_tokens / self.headroom[branch] ** 2
            for child in children:
                tokens = height[child] if size[child] > segment_tokens else size[child]
                self.as_child[child] = self.inside[child] + tokens * per_token
            if not children or (branch < len(branches) and size[branch] <= segment_tokens):
                continue
            first = max(children, key=lambda child: (height[child], child))
            total = sum(self.inside[child] if child == first else self.as_child[child] for child in children)
            self.inside[branch] = total


@dataclass(slots=True)
class _Open:
    """A placed branch that still has children to place."""

    branch: int
    segment: int  # the segment that holds the end of the branch; -1 above the roots
    cap: int  # most tokens of that segment, so that its ancestors' other children still fit
    siblings: Siblings
    pressure: float  # sum over the children to place
    pressure_above: float  # the same sum for the ancestors that end in the same segment
    contiguous: bool  # part of a run whose end was chosen, so no segment inside it may close early
    queue: list[int] = field(default_factory=list)  # sizes of the remaining children of the current run
    close_at: int = -1  # after the run, close the segment if at most this much room is left


class _Choice(NamedTuple):
    """The next child, whether to close the segment before it, and otherwise how many tokens the segment may hold."""

    child: int
    close: bool
    cap: int = 0
    pressure_above: float = 0.0


class SegmentWalk:
    """One walk over a forest with one strategy."""

    def __init__(
        self, branches: Branches, pressure: MemoryPressure, segment_tokens: int, budget: int, strategy: Strategy
    ) -> None:
        self.branches, self.pressure, self.strategy = branches, pressure, strategy
        self.segment_tokens, self.budget = segment_tokens, budget
        self.tolerance = int(strategy.tolerance * segment_tokens)
        self.above: list[int] = []  # number of tokens in each segment's ancestors
        self.used: list[int] = []  # number of tokens in each segment
        self.current = -1  # the segment being filled; -1 if there is none
        self.cap = 0  # most tokens that the current segment may hold
        self.order: list[int] = []
        self.with_subtree: list[bool] = []
        self.open: list[_Open] = []
        self.steps = 0

    def run(self) -> WalkResult:
        """Place all branches of the forest."""
        self._enter(len(self.branches), -1)
        while self.open:
            node = self.open[-1]
            if not node.siblings.count:
                self.open.pop()
                continue
            self.steps += 1
            choice = self._choose(node)
            node.siblings.take(choice.child)
            node.pressure -= self.pressure.as_child[choice.child]
            self._place(node, choice)
        in_flight = [above + used for above, used in zip(self.above, self.used, strict=True)]
        return WalkResult(self.used, in_flight, self.order, self.with_subtree, self.steps)

    def _constraint(self, child: int) -> tuple[float, ...]:
        """Sort key of a child: the most constrained child comes last."""
        height, pressure = self.branches.height[child], self.pressure.inside[child]
        first = (height, pressure) if self.strategy.tallest_first else (pressure, height)
        return (*first, self.branches.size[child], -child)

    def _enter(self, branch: int, segment: int, pressure_above: float = 0.0, contiguous: bool = False) -> None:
        """Open a branch whose own tokens have been placed, if it has children."""
        children = self.branches.children[branch]
        if children:
            siblings = Siblings(children, self.branches.size, self.branches.height, self._constraint)
            pressure = sum(self.pressure.as_child[child] for child in children)
            self.open.append(_Open(branch, segment, self.cap, siblings, pressure, pressure_above, contiguous))

    def _place(self, node: _Open, choice: _Choice) -> None:
        """Put a child's tokens into segments, or its whole subtree if it fits into the current one."""
        child, pressure_above = choice.child, choice.pressure_above
        if choice.close:
            self.current = -1
        else:
            self.cap = choice.cap
        if self.current < 0 or self.used[self.current] >= self.cap:
            self._begin_segment(node.segment)
            pressure_above = 0.0
        self.order.append(child)
        fits = self.branches.size[child] <= self.cap - self.used[self.current]
        self.with_subtree.append(fits)
        if fits:
            self.used[self.current] += self.branches.size[child]
            return
        left = self.branches.length[child]
        while left:
            if self.used[self.current] >= self.cap:
                self._begin_segment(self.current)
                pressure_above = 0.0
            tokens = min(left, self.cap - self.used[self.current])
            self.used[self.current] += tokens
            left -= tokens
        self._enter(child, self.current, pressure_above, contiguous=node.contiguous or node.close_at >= 0)

    def _begin_segment(self, parent: int) -> None:
        above = self._in_flight(parent)
        self.current = len(self.used)
        self.above.append(above)
        self.used.append(0)
        self.cap = min(self.segment_tokens, self.budget - above)

    def _in_flight(self, segment: int) -> int:
        return self.above[segment] + self.used[segment] if segment >= 0 else 0

    def _choose(self, node: _Open) -> _Choice:
        """Choose the next child of ``node`` and whether it continues the current segment."""
        if self.current < 0:
            return self._close(node)
        here = node.segment == self.current
        cap = node.cap if here else min(self.segment_tokens, self.budget - self.above[self.current])
        free = cap - self.used[self.current]
        if free <= 0:
            return self._close(node)
        if node.queue:
            return _Choice(node.siblings.of_size(node.queue.pop()), close=False, cap=cap)
        if free <= node.close_at:
            child = node.siblings.largest_within(free)
            return self._close(node) if child is None else _Choice(child, close=False, cap=cap)
        node.close_at = -1
        if node.siblings.tokens <= self._headroom():
            return self._all_fit(node, cap, free, here)
        return self._continue_branch(node, cap, free) if here else self._cross_boundary(node, cap, free)

    def _headroom(self) -> int:
        return self.budget - self._in_flight(self.current)

    def _close(self, node: _Open) -> _Choice:
        """Open a new segment, first for a child that cannot be placed contiguously, else for a run of children."""
        node.queue, node.close_at = [], -1
        headroom = self.budget - self._in_flight(node.segment)
        child = node.siblings.most_constrained_above(headroom)
        if child is None:
            sizes = node.siblings.sizes_within(headroom)
            run = least_wasteful(sizes, self.segment_tokens, self.segment_tokens, headroom, per_token=True)
            child = self._start(node, run)
        return _Choice(child, close=True)

    def _start(self, node: _Open, run: Run | None) -> int:
        """Queue a run and return its first child."""
        assert run is not None, "every child fits into the headroom"
        node.queue = list(run.sizes)
        node.close_at = run.wasted if run.wasted <= self.tolerance else -1
        return node.siblings.of_size(node.queue.pop())

    def _all_fit(self, node: _Open, cap: int, free: int, here: bool) -> _Choice:
        """Place remaining children that all fit contiguously, so no room need be wasted before their end.

        Closing a segment early at a small cost can still pay: the last tokens, and the next subtree, then have fewer
        tokens in flight.
        """
        siblings, size = node.siblings, self.segment_tokens
        may_close = not here and not node.contiguous
        if may_close and siblings.tokens > free:
            end_above = self.above[self.current] + (self.used[self.current] + siblings.tokens) // size * size
            if end_above > self._in_flight(node.segment):
                tolerance = max(self.tolerance, int(self.strategy.early_share * ((free - siblings.tokens) % size)))
                limit = siblings.tokens - 1
                run = longest_within(siblings.sizes_within(limit), free, size, limit, tolerance)
                if run is not None:
                    child = self._start(node, run)
                    node.close_at = run.wasted
                    return _Choice(child, close=False, cap=cap)
        child = siblings.largest_within(free)
        if child is None:
            if may_close and free <= self.tolerance:
                return _Choice(siblings.largest(), close=True)
            child = siblings.largest()
        return _Choice(child, close=False, cap=cap)

    def _continue_branch(self, node: _Open, cap: int, free: int) -> _Choice:
        """Choose a child of a branch that ends in the current segment.

        All tokens added to that segment stay in flight for the branch's other children.
        """
        siblings = node.siblings
        child = siblings.most_constrained()
        if siblings.count == 1:
            return _Choice(child, close=False, cap=cap, pressure_above=node.pressure_above)
        used, headroom = self.used[self.current], self._headroom()
        free = min(free, headroom - siblings.tallest_besides(child))
        pressure = node.pressure_above + node.pressure - self.pressure.as_child[child]
        others = siblings.tokens - self.branches.size[child]

        def cost(tokens: int) -> float:
            return self._headroom_cost(node, pressure, others, headroom, tokens)

        if free > 0:
            # Use all of the room, or only so much that the other children keep the headroom of one segment.
            spare = headroom - self.segment_tokens
            tokens = min([free, spare] if 0 < spare < free else [free], key=lambda tokens: cost(tokens) - tokens)
            if cost(tokens) < tokens:
                return _Choice(child, close=False, cap=used + tokens, pressure_above=pressure)
            # The segment should close early. If the child is a short branch with children of its own, closing after it
            # costs little more and saves a segment.
            length = self.branches.length[child]
            if length < free and self.branches.size[child] > headroom and 2 * cost(length) < self.segment_tokens:
                return _Choice(child, close=False, cap=used + free, pressure_above=pressure)
        return _Choice(child, close=True)

    def _headroom_cost(self, node: _Open, pressure: float, tokens: int, headroom: int, lost: int) -> float:
        """Expected waste, in tokens, when subtrees below ``node`` lose ``lost`` tokens of ``headroom``.

        Args:
            pressure: memory pressure of those subtrees.
            tokens: number of tokens in those subtrees.
        """
        before, after = max(1, headroom), max(1, headroom - lost)
        scale = self.pressure.headroom[node.branch] ** 2 / (before * after)
        cost = self.strategy.waste_per_end * pressure * lost * scale
        if after < self.segment_tokens:
            cost += tokens * self.segment_tokens * (1 / after - 1 / min(before, self.segment_tokens))
        return cost

    def _crossing_cost(self, node: _Open, child: int, headroom: int, fresh: int, extra: int) -> float:
        """Expected waste, in tokens, if ``child`` continues the current segment instead of opening a new one.

        Args:
            headroom: headroom in the current segment.
            fresh: headroom in a new segment.
            extra: tokens of the previous subtree's path that stay in flight.
        """
        cost = self._headroom_cost(node, self.pressure.inside[child], 0, fresh, extra)
        if headroom < self.segment_tokens:
            short = 1 / max(1, headroom) - 1 / min(fresh, self.segment_tokens)
            cost += self.branches.size[child] * self.segment_tokens * short
        return cost

    def _cross_boundary(self, node: _Open, cap: int, free: int) -> _Choice:
        """Continue a segment that began in another subtree with the cheapest child or run, or close it."""
        siblings, headroom = node.siblings, self._headroom()
        fresh = self.budget - self._in_flight(node.segment)
        extra = max(0, self.above[self.current] - self._in_flight(node.segment))
        above = siblings.some_above(headroom)
        best, least = None, float(free)
        fitting = [child for child in above if self.branches.height[child] <= headroom]
        if fitting:
            inside = self.pressure.inside
            key = (lambda child: (-inside[child], *self._constraint(child))) if extra else self._constraint
            child = max(fitting, key=key)
            cost = self._crossing_cost(node, child, headroom, fresh, extra)
            if cost < least:
                best, least = child, cost
        sizes = siblings.sizes_within(headroom)
        if sizes and least > 0:
            run = least_wasteful(sizes, free, self.segment_tokens, headroom, per_token=not above)
            if run is not None and run.wasted < least:
                return _Choice(self._start(node, run), close=False, cap=cap)
        return self._close(node) if best is None else _Choice(best, close=False, cap=cap)
