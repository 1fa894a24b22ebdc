"""The children of one branch that are yet to be laid out, by size, by height and by how much they need headroom."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

# How many children a choice looks at from either end of the sizes; more would cost time and hardly choose better.
LOOK_AT = 20


class Siblings:
    """Children that are yet to be laid out; all orders are total, so every choice is reproducible.

    Attributes:
        count: how many are left.
        tokens: tokens of their subtrees.
    """

    def __init__(
        self,
        children: Sequence[int],
        size: Sequence[int],
        height: Sequence[int],
        need: Callable[[int], tuple[float, ...]],
    ) -> None:
        self._size, self._height = size, height
        self._of_size: dict[int, list[int]] = {}
        for child in reversed(children):
            self._of_size.setdefault(size[child], []).append(child)
        self._left_of_size = {each: len(group) for each, group in self._of_size.items()}
        self._sizes = sorted(self._of_size)
        self._by_height = sorted(children, key=lambda child: (height[child], -child))
        self._by_need = sorted(children, key=need)
        self._taken: set[int] = set()
        self.count = len(children)
        self.tokens = sum(size[child] for child in children)

    def take(self, child: int) -> None:
        """Remove a child."""
        size = self._size[child]
        self._taken.add(child)
        self.count -= 1
        self.tokens -= size
        self._left_of_size[size] -= 1
        if not self._left_of_size[size]:
            del self._sizes[bisect_right(self._sizes, size) - 1]

    def of_size(self, size: int) -> int:
        """A child of this size (there must be one)."""
        return self._last_left(self._of_size[size])

    def largest_within(self, limit: int) -> int | None:
        """The largest child of at most ``limit`` tokens."""
        i = bisect_right(self._sizes, limit)
        return self.of_size(self._sizes[i - 1]) if i else None

    def largest(self) -> int:
        """The largest child."""
        return self.of_size(self._sizes[-1])

    def most_constrained(self) -> int:
        """The child that comes last in the order of need."""
        return self._last_left(self._by_need)

    def tallest_besides(self, child: int) -> int:
        """Height of the tallest child other than ``child``; 0 if there is none."""
        tallest = self._last_left(self._by_height)
        if tallest != child:
            return self._height[tallest]
        for other in reversed(self._by_height):
            if other != child and other not in self._taken:
                return self._height[other]
        return 0

    def most_constrained_above(self, limit: int) -> int | None:
        """The most constrained child above ``limit`` tokens; among many, one of the most constrained or largest."""
        if self._sizes[-1] <= limit:
            return None
        self._last_left(self._by_need)
        for child in self._by_need[: -LOOK_AT - 1 : -1]:
            if child not in self._taken and self._size[child] > limit:
                return child
        return self.largest()

    def some_above(self, limit: int) -> list[int]:
        """Children of more than ``limit`` tokens of different sizes; among many, the smallest and the largest."""
        i = bisect_right(self._sizes, limit)
        sizes = self._sizes[i:]
        if len(sizes) > LOOK_AT:
            sizes = sizes[: LOOK_AT // 2] + sizes[-LOOK_AT // 2 :]
        return [self.of_size(size) for size in sizes]

    def sizes_within(self, limit: int) -> list[int]:
        """Ascending sizes of the children of at most ``limit`` tokens; among many, those of the smallest and the
        largest."""
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
        """The last child of the list that is left; those after it are dropped from the list."""
        while children[-1] in self._taken:
            children.pop()
        return children[-1]
