"""Lays a forest's branches out one after another and closes segments on the way: one walk, one plan.

The walk keeps two facts at every step, so it never runs into a dead end:

- what is in flight, with what the rest of the open subtrees needs, is within the budget: a subtree is only begun where
  the tokens in flight and its height fit;
- where a branch ended in the segment that is still being filled and has children to come, that segment is closed early
  enough for them: they will find all of it in flight.

What it can choose is which child comes next, and whether to close the current segment before it. A child that goes on
in a segment that began deep in another subtree (*crossing a boundary*) saves the room left there, but has that
subtree's path in flight until it is done: *debt*. Closing wastes the room, and the child finds nothing in flight but
its ancestors' segments. Subtrees that fit the budget whatever their shape can be laid out straight, with no room
wasted; a run of them is chosen to end with a segment.

Costs are in tokens of wasted room. With headroom H (budget less what is in flight) some run must be ended about every H
tokens, which wastes a share ``waste_per_end`` of a segment of S tokens: T tokens cost w T S / H, and losing D of the
headroom costs w T S D / (H (H - D)). Below H = S, segments are cut short, S / H for one. The *pressure* of a subtree
sums T S / H^2 over its branch points, each with the headroom it has when only its own path is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_dta.planning.segments.branches import Branches
from megatron_dta.planning.segments.siblings import Siblings
from megatron_dta.planning.segments.subset_sum import Run, fewest_wasted, least_wasteful, longest_within


@dataclass(frozen=True)
class Strategy:
    """What the walk cannot know and several values of which are worth trying.

    Attributes:
        waste_per_end: share of a segment that is expected to be wasted where a run ends.
        tallest_first: among subtrees that do not fit straight, begin with the tallest, else with the one of most
            pressure.
        tolerance: share of a segment that may be wasted to end a run with it.
        early_share: the last run of a subtree is ended early where that wastes less than this share of what its end
            would.
    """

    waste_per_end: float
    tallest_first: bool
    tolerance: float
    early_share: float


@dataclass
class Layout:
    """Result of a walk.

    Attributes:
        lengths: tokens of each segment.
        in_flight: tokens of each segment and its ancestors.
        order: branches in the order they were laid out; of a subtree that went into one segment whole, only its first.
        whole: for each of them, whether its whole subtree was laid out with it.
        steps: choices made, a measure of the time it took.
    """

    lengths: list[int]
    in_flight: list[int]
    order: list[int]
    whole: list[bool]
    steps: int


class Pressure:
    """Pressure of every subtree and of every child on its parent's headroom, for one budget."""

    def __init__(self, branches: Branches, segment_tokens: int, budget: int) -> None:
        size, height = branches.size, branches.height
        #: full headroom at the end of each branch (and above the roots)
        self.headroom = [max(budget - depth, segment_tokens) for depth in branches.depth]
        #: of the branch points inside each subtree; one that fits into a segment has none
        self.inside = [0.0] * (len(branches) + 1)
        #: with the child's own tokens, as one of several children of its parent
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


class _Open:
    """A branch that is laid out and has children to come."""

    __slots__ = ("branch", "cap", "close_at", "pressure", "pressure_above", "queue", "segment", "siblings", "straight")

    def __init__(self, branch: int, segment: int, cap: int, siblings: Siblings) -> None:
        self.branch = branch
        self.segment = segment  # that holds its end, -1 above the roots
        self.cap = cap  # most tokens of that segment, for the sake of its ancestors' other children
        self.siblings = siblings
        self.pressure = 0.0  # of the children to come
        self.pressure_above = 0.0  # of the children to come of the ancestors that ended in the same segment
        self.queue: list[int] = []  # sizes of the children of the run under way
        self.close_at = -1  # after the run, close the segment if no more than this room is left
        self.straight = False  # part of a run that ends with a segment, which no waste on the way may shift


class _Choice(NamedTuple):
    """The next child; whether the segment is closed before it, and else how many tokens the segment may hold."""

    child: int
    close: bool
    cap: int = 0
    pressure_above: float = 0.0


class Walk:
    """One walk over a forest with one strategy."""

    def __init__(
        self, branches: Branches, pressure: Pressure, segment_tokens: int, budget: int, strategy: Strategy
    ) -> None:
        self.branches, self.pressure, self.strategy = branches, pressure, strategy
        self.segment_tokens, self.budget = segment_tokens, budget
        self.tolerance = int(strategy.tolerance * segment_tokens)
        self.above: list[int] = []  # tokens of each segment's ancestors
        self.used: list[int] = []  # tokens of each segment
        self.current = -1  # segment being filled, -1: none
        self.cap = 0  # most tokens of the current segment
        self.order: list[int] = []
        self.whole: list[bool] = []
        self.open: list[_Open] = []
        self.steps = 0

    def run(self) -> Layout:
        """Lay the forest out."""
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
            self._lay_out(node, choice)
        in_flight = [above + used for above, used in zip(self.above, self.used, strict=True)]
        return Layout(self.used, in_flight, self.order, self.whole, self.steps)

    def _need(self, child: int) -> tuple[float, ...]:
        height, pressure = self.branches.height[child], self.pressure.inside[child]
        first = (height, pressure) if self.strategy.tallest_first else (pressure, height)
        return (*first, self.branches.size[child], -child)

    def _enter(self, branch: int, segment: int, pressure_above: float = 0.0, straight: bool = False) -> None:
        """Open a branch whose tokens have been laid out."""
        children = self.branches.children[branch]
        if children:
            siblings = Siblings(children, self.branches.size, self.branches.height, self._need)
            node = _Open(branch, segment, self.cap, siblings)
            node.pressure = sum(self.pressure.as_child[child] for child in children)
            node.pressure_above, node.straight = pressure_above, straight
            self.open.append(node)

    def _lay_out(self, node: _Open, choice: _Choice) -> None:
        """Put a child's tokens, or its whole subtree where it fits, into segments."""
        child, pressure_above = choice.child, choice.pressure_above
        if choice.close:
            self.current = -1
        else:
            self.cap = choice.cap
        if self.current < 0 or self.used[self.current] >= self.cap:
            self._begin_segment(node.segment)
            pressure_above = 0.0
        self.order.append(child)
        whole = self.branches.size[child] <= self.cap - self.used[self.current]
        self.whole.append(whole)
        if whole:
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
        self._enter(child, self.current, pressure_above, straight=node.straight or node.close_at >= 0)

    def _begin_segment(self, parent: int) -> None:
        above = self._in_flight(parent)
        self.current = len(self.used)
        self.above.append(above)
        self.used.append(0)
        self.cap = min(self.segment_tokens, self.budget - above)

    def _in_flight(self, segment: int) -> int:
        return self.above[segment] + self.used[segment] if segment >= 0 else 0

    def _choose(self, node: _Open) -> _Choice:
        """The next child of ``node`` and whether it goes on in the current segment."""
        if self.current < 0:
            return self._close(node)
        here = node.segment == self.current
        cap = node.cap if here else min(self.segment_tokens, self.budget - self.above[self.current])
        room = cap - self.used[self.current]
        if room <= 0:
            return self._close(node)
        if node.queue:
            return _Choice(node.siblings.of_size(node.queue.pop()), close=False, cap=cap)
        if room <= node.close_at:
            child = node.siblings.largest_within(room)
            return self._close(node) if child is None else _Choice(child, close=False, cap=cap)
        node.close_at = -1
        if node.siblings.tokens <= self._headroom():
            return self._all_fit(node, cap, room, here)
        return self._go_on(node, cap, room) if here else self._cross_boundary(node, cap, room)

    def _headroom(self) -> int:
        return self.budget - self._in_flight(self.current)

    def _close(self, node: _Open) -> _Choice:
        """Open a new segment below the branch: with what does not fit straight, else with a run."""
        node.queue, node.close_at = [], -1
        headroom = self.budget - self._in_flight(node.segment)
        child = node.siblings.most_constrained_above(headroom)
        if child is None:
            sizes = node.siblings.sizes_within(headroom)
            run = least_wasteful(sizes, self.segment_tokens, self.segment_tokens, headroom)
            child = self._start(node, run)
        return _Choice(child, close=True)

    def _start(self, node: _Open, run: Run | None) -> int:
        """First child of a run; the others are queued."""
        assert run is not None, "every child is within the headroom"
        node.queue = list(run.sizes)
        node.close_at = run.wasted if run.wasted <= self.tolerance else -1
        return node.siblings.of_size(node.queue.pop())

    def _all_fit(self, node: _Open, cap: int, room: int, here: bool) -> _Choice:
        """All that is left below the branch fits straight, so no room need be wasted before its end.

        Still, ending a segment early at small cost leaves the last tokens with little in flight, and so the next
        subtree.
        """
        siblings, size = node.siblings, self.segment_tokens
        may_close = not here and not node.straight
        if may_close and siblings.tokens > room:
            end_above = self.above[self.current] + (self.used[self.current] + siblings.tokens) // size * size
            if end_above > self._in_flight(node.segment):
                tolerance = max(self.tolerance, int(self.strategy.early_share * ((room - siblings.tokens) % size)))
                limit = siblings.tokens - 1
                run = longest_within(siblings.sizes_within(limit), room, size, limit, tolerance)
                if run is not None:
                    child = self._start(node, run)
                    node.close_at = run.wasted
                    return _Choice(child, close=False, cap=cap)
        child = siblings.largest_within(room)
        if child is None:
            if may_close and room <= self.tolerance:
                return _Choice(siblings.largest(), close=True)
            child = siblings.largest()
        return _Choice(child, close=False, cap=cap)

    def _go_on(self, node: _Open, cap: int, room: int) -> _Choice:
        """The branch ended in the current segment: what else goes in will be in flight for all its other children."""
        siblings = node.siblings
        child = siblings.most_constrained()
        if siblings.count == 1:
            return _Choice(child, close=False, cap=cap, pressure_above=node.pressure_above)
        used, headroom = self.used[self.current], self._headroom()
        room = min(room, headroom - siblings.tallest_besides(child))
        pressure = node.pressure_above + node.pressure - self.pressure.as_child[child]
        others = siblings.tokens - self.branches.size[child]

        def cost(tokens: int) -> float:
            return self._cost(node, pressure, others, headroom, tokens)

        if room > 0:
            # All of the room, or as much as leaves the others a segment.
            spare = headroom - self.segment_tokens
            tokens = min([room, spare] if 0 < spare < room else [room], key=lambda tokens: cost(tokens) - tokens)
            if cost(tokens) < tokens:
                return _Choice(child, close=False, cap=used + tokens, pressure_above=pressure)
            # The segment is to be closed early; after a short branch that will branch again is as good and saves a
            # segment.
            length = self.branches.length[child]
            if length < room and self.branches.size[child] > headroom and 2 * cost(length) < self.segment_tokens:
                return _Choice(child, close=False, cap=used + room, pressure_above=pressure)
        return _Choice(child, close=True)

    def _cost(self, node: _Open, pressure: float, tokens: int, headroom: int, lost: int) -> float:
        """Tokens wasted in a subtree of ``tokens`` and ``pressure`` below ``node`` when it loses ``lost`` of
        ``headroom``."""
        before, after = max(1, headroom), max(1, headroom - lost)
        scale = self.pressure.headroom[node.branch] ** 2 / (before * after)
        cost = self.strategy.waste_per_end * pressure * lost * scale
        if after < self.segment_tokens:
            cost += tokens * self.segment_tokens * (1 / after - 1 / min(before, self.segment_tokens))
        return cost

    def _cross_boundary(self, node: _Open, cap: int, room: int) -> _Choice:
        """The current segment began elsewhere: go on with what costs least, or close it."""
        siblings, headroom = node.siblings, self._headroom()
        fresh = self.budget - self._in_flight(node.segment)
        debt = max(0, self.above[self.current] - self._in_flight(node.segment))
        above = siblings.some_above(headroom)
        best, least = None, float(room)
        fitting = [child for child in above if self.branches.height[child] <= headroom]
        if fitting:
            inside = self.pressure.inside
            key = (lambda child: (-inside[child], *self._need(child))) if debt else self._need
            child = max(fitting, key=key)
            cost = self._cost(node, inside[child], 0, fresh, debt)
            if headroom < self.segment_tokens:
                short = 1 / max(1, headroom) - 1 / min(fresh, self.segment_tokens)
                cost += self.branches.size[child] * self.segment_tokens * short
            if cost < least:
                best, least = child, cost
        sizes = siblings.sizes_within(headroom)
        if sizes and least > 0:
            choose = fewest_wasted if above else least_wasteful
            run = choose(sizes, room, self.segment_tokens, headroom)
            if run is not None and run.wasted < least:
                return _Choice(self._start(node, run), close=False, cap=cap)
        return self._close(node) if best is None else _Choice(best, close=False, cap=cap)
