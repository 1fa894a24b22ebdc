"""Keeps the children of one branch that are not placed yet, ordered by size, by height and by constraint.

The constraint key is the walk's: the child that comes last in its order is the hardest to place later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

# A choice considers this many children from each end of the size order. More cost time and rarely change the choice.
LOOK_AT = 20


class Siblings:
    """The children of one branch that are not placed yet.

    All orders are total, so every choice is reproducible.

    Attributes:
        count: number of remaining children.
        tokens: number of tokens in their subtrees.
    """

    def __init__(
        self,
        children: Sequence[int],
        size: Sequence[int],
        height: Sequence[int],
        constraint: Callable[[int], tuple[float, ...]],
    ) -> None:
        self._size, self._height = size, height
        self._of_size: dict[int, list[int]] = {}
        for child in reversed(children):
            self._of_size.setdefault(size[child], []).append(child)
        self._left_of_size = {tokens: len(group) for tokens, group in self._of_size.items()}
        self._sizes = sorted(self._of_size)
        self._by_height = sorted(children, key=lambda child: (height[child], -child))
        self._by_constraint = sorted(children, key=constraint)
        self._taken: set[int] = set()
        self.count = len(children)
        self.tokens = sum(size[child] for child in children)

    def take(self, child: int) -> None:
        size = self._size[child]
        self._taken.add(child)
        self.count -= 1
        self.tokens -= size
        self._left_of_size[size] -= 1
        if not self._left_of_size[size]:
            del self._sizes[bisect_right(self._sizes, size) - 1]

    def of_size(self, size: int) -> int:
        """A remaining child of exactly ``size`` tokens; one must exist."""
        return self._last_left(self._of_size[size])

    def largest_within(self, limit: int) -> int | None:
        """The largest child of at most ``limit`` tokens, or None."""
        i = bisect_right(self._sizes, limit)
        return self.of_size(self._sizes[i - 1]) if i else None

    def largest(self) -> int:
        return self.of_size(self._sizes[-1])

    def most_constrained(self) -> int:
        """The child with the largest constraint key."""
        return self._last_left(self._by_constraint)

    def tallest_besides(self, child: int) -> int:
        """Height of the tallest remaining child other than ``child``; 0 if there is no other."""
        tallest = self._last_left(self._by_height)
        if tallest != child:
            return self._height[tallest]
        for other in reversed(self._by_height):
            if other != child and other not in self._taken:
                return self._height[other]
        return 0

    def most_constrained_above(self, limit: int) -> int | None:
        """The most constrained child of more than ``limit`` tokens, or None.

        Only the ``LOOK_AT`` most constrained children are considered; if none of them is larger than ``limit``, the
        result is the largest child.
        """
        if self._sizes[-1] <= limit:
            return None
        self._last_left(self._by_constraint)
        for child in self._by_constraint[: -LOOK_AT - 1 : -1]:
            if child not in self._taken and self._size[child] > limit:
                return child
        return self.largest()

    def some_above(self, limit: int) -> list[int]:
        """One child for each size above ``limit`` tokens; if there are too many sizes, the smallest and the largest."""
        i = bisect_right(self._sizes, limit)
        sizes = self._sizes[i:]
        if len(sizes) > LOOK_AT:
            sizes = sizes[: LOOK_AT // 2] + sizes[-LOOK_AT // 2 :]
        return [self.of_size(size) for size in sizes]

    def sizes_within(self, limit: int) -> list[int]:
        """Sizes of the children of at most ``limit`` tokens, ascending.

        If there are too many, the result has the sizes of the smallest and of the largest ones.
        """
        end = bisect_right(self._sizes, limit)
        largest: list[int] = []
        last = end
        while last > 0 and len(largest) < LOOK_AT:
            last -= 1
            largest.extend(self._repeated(self._sizes[last]))
        smallest: list[int] = []
        first = 0
        while first < last and len(smallest) < LOOK_AT:
            smallest.extend(self._repeated(self._sizes[first]))
            first += 1
        return smallest[:LOOK_AT] + largest[:LOOK_AT][::-1]

    def _repeated(self, size: int) -> list[int]:
        return [size] * min(self._left_of_size[size], LOOK_AT)

    def _last_left(self, children: list[int]) -> int:
        """The last remaining child of ``children``; taken children after it are removed from the list."""
        while children[-1] in self._taken:
            children.pop()
        return children[-1]
