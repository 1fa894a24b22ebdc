"""Forms pairs of ops that take turns, so that one computes while the tokens of the other one travel to experts.

Two ops may share their time if neither needs the other: the forward of a segment and the backward of another one, or
two forwards of segments that are not parent and child. Two backwards are not paired: both would add to the same
gradients.

The list of ops is walked once. Each backward takes the next forward that is possible by then as its partner, which
begins that segment earlier; so the tokens in flight must stay within the limit until its old place. A second walk also
pairs forwards without a backward. Everything else keeps its order, and the list with more time in pairs is returned. A
pair shares the time of its cheaper op.

Example: segment 0 (4 tokens) has children 1 (3) and 2 (2); the limit is 9.

    F0  F1  (F2 B1)  B2  B0        from F0 F1 B1 F2 B2 B0: 9 tokens are in flight in the pair
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_dta.planning.pipeline.schedule import PipelineOp
from megatron_dta.planning.segments.schedule import OpKind
from megatron_dta.planning.step.passes import PassPlan

_TIMES = {OpKind.FORWARD: 1, OpKind.BACKWARD: 2}
# Forwards from which a partner is chosen, in a pass with backwards and in one without, where K and V of segments that
# run early take memory that is not counted.
_MOST_CANDIDATES, _MOST_FORWARDS = 64, 4


def with_pairs(
    plan: PassPlan,
    segments: Sequence[Sequence[int]],
    parents: Sequence[Sequence[int]],
    lengths: Sequence[Sequence[int]],
    limit: int,
) -> PassPlan:
    """``plan`` with its ops in pairs, in the same way on all ranks.

    Args:
        plan: a pass of a single stage with ``most_tokens``.
        segments: for each op the segments of all ranks; negative for an empty one.
        parents, lengths: for each rank the parent and the tokens of each segment.
        limit: maximum number of tokens in flight on a rank; those of the plan if they are more. Not used in a pass
            without backwards.
    """
    ops, tokens = plan.schedule.ops[0], plan.most_tokens[0]
    kinds = [op.kind for op in ops]
    walks = [_Walk(kinds, segments, parents, lengths, limit) for _ in range(2)]
    for walk, pairs_forwards in zip(walks, (False, True), strict=True):
        walk.run(pairs_forwards)
    costs = [_TIMES[kind] * (1 + count) for kind, count in zip(kinds, tokens, strict=True)]
    best = max(walks, key=lambda walk: walk.shared(costs))
    order: list[PipelineOp] = [ops[at] for at in best.order]
    return replace(
        plan,
        schedule=replace(plan.schedule, ops=[order], pairs=(tuple(best.pairs),)),
        most_tokens=[[tokens[at] for at in best.order]],
    )


class _Walk:
    """One walk over the ops.

    Attributes:
        order: the numbers of the ops in their new order.
        pairs: places in ``order`` at which pairs begin.
    """

    def __init__(
        self,
        kinds: Sequence[OpKind],
        segments: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
        limit: int,
    ) -> None:
        def of_ranks(values: Sequence[Sequence[int]], empty: int) -> list[list[int]]:
            return [
                [own[each] if each >= 0 else empty for own, each in zip(values, op, strict=True)] for op in segments
            ]

        self._is_forward = [kind is OpKind.FORWARD for kind in kinds]
        self._segments, self._parents, self._tokens = segments, of_ranks(parents, -1), of_ranks(lengths, 0)
        self._counts_tokens = not all(self._is_forward)
        self.order, self.pairs = list(range(len(kinds))), list[int]()
        self._loads = self._tokens_in_flight()
        self._limit = max([limit, *map(max, self._loads)])

    def run(self, pairs_forwards: bool) -> None:
        """Form the pairs, also of two forwards if ``pairs_forwards``."""
        at = 0
        while at < len(self.order):
            if self._is_pair(at):
                self.pairs.append(at)
                at += 2
                continue
            is_forward = self._is_forward[self.order[at]]
            target = at + 1 if is_forward else at
            partner = None if is_forward and not pairs_forwards else self._partner(at, target)
            if partner is not None:
                self.order.insert(target, self.order.pop(partner))
                self._loads = self._tokens_in_flight()
                self.pairs.append(at)
            at += 1 if partner is None else 2

    def _tokens_in_flight(self) -> list[list[int]]:
        """Tokens in flight on each rank after each op."""
        found, alive = list[list[int]](), [0] * len(self._tokens[0]) if self._tokens else []
        for number in self.order:
            sign = self._counts_tokens * (1 if self._is_forward[number] else -1)
            alive = [load + sign * own for load, own in zip(alive, self._tokens[number], strict=True)]
            found.append(alive)
        return found

    def _is_pair(self, at: int) -> bool:
        """Whether a forward at this place and a later backward may take turns where they are."""
        if at + 1 == len(self.order):
            return False
        first, then = self.order[at], self.order[at + 1]
        if not self._is_forward[first] or self._is_forward[then]:
            return False
        return not any(
            one == other >= 0 for one, other in zip(self._segments[first], self._segments[then], strict=True)
        )

    def _partner(self, at: int, target: int) -> int | None:
        """The place of the next forward that could run at ``target``, beside the op at ``at``; None if there is none.

        Until its old place it is in flight beside what is in flight there.
        """
        begun = [set[int]() for _ in self._tokens[0]]
        most = self._loads[target - 1] if target else [0] * len(begun)
        candidates = 0
        for place in range(at, len(self.order)):
            number = self.order[place]
            if self._is_forward[number]:
                if place > at:
                    candidates += 1
                    is_free = not any(own in of for own, of in zip(self._parents[number], begun, strict=True))
                    fits = max(map(sum, zip(most, self._tokens[number], strict=True))) <= self._limit
                    fits = fits or not self._counts_tokens
                    if is_free and fits:
                        return place
                    if candidates == (_MOST_CANDIDATES if self._counts_tokens else _MOST_FORWARDS):
                        return None
                for of, own in zip(begun, self._segments[number], strict=True):
                    if own >= 0:
                        of.add(own)
            if place >= target:
                most = [max(*each) for each in zip(most, self._loads[place], strict=True)]
        return None

    def shared(self, costs: Sequence[int]) -> int:
        """Time of the cheaper ops of all pairs."""
        return sum(min(costs[self.order[at]], costs[self.order[at + 1]]) for at in self.pairs)


def pieces(num_ops: int, pairs: Sequence[int]) -> list[list[int]]:
    """The numbers of the ops that run together: two of a pair, or one."""
    first, found, at = set(pairs), list[list[int]](), 0
    while at < num_ops:
        size = 2 if at in first else 1
        found.append(list(range(at, at + size)))
        at += size
    return found
