"""Decides which nodes of one query's tree to decode next, each time a node has been decoded.

**The rule.** A path decodes one segment at a time; all paths that one decision starts form a *round*. When the n paths
of a round have decoded their segments, f of them have finished (end of sequence, answer, length) and
become leaves. The A = n - f others branch into ``budget.branch_budget`` children in total, divided evenly or by
logprob, which form the next round. If no path of a round is alive and leaves are missing, the query falls back.

**Fallback.** A new branch starts at the end of an existing node, so it is conditioned on exactly the tokens that are
recorded before it. Finished paths, in random order, each select a node strictly above their leaf (possibly the root)
with equal probability, which gets up to N new children, until no leaves are missing. With ``finished`` only paths with
an end of sequence or an answer are candidates, and the root if there are none. Leaf weights account for the dependence
on outcomes (``SampledTree.leaf_weights``).

With w leaves wanted and F finished before a round, w - F >= n always holds: a round has at most w - F - f children, and
fallback starts exactly w - F. So the tree has exactly w leaves unless fallback is ``none``.

Example with w = 8, branching factor 2 and 2 initial branches: if both paths of the first round are alive, they branch
into max(2, min(8, 2 x 2)) = 4. If one of these 4 finishes, the other 3 share max(3, min(7, 2 x 4)) = 7 children.

**No barrier.** A path does not wait for its round. As soon as it has decoded its segment, it starts the children that
it gets regardless of the rest of the round (``budget.certain_branches``: the budget per living path only grows as more
paths finish; with a division by logprob: one child). When more of the round is known, the node gets its remaining
children. If the segments of a round reach the maximum length, all its paths will end; a random fallback starts along
with them, since it does not depend on how they end. The decisions of a round depend only on what its paths and earlier
rounds decoded, and the tokens of a node are keyed by its path. So the finished tree is a function of the query, the
weights and the settings, and does not depend on the order in which an engine finishes requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.sampling.treepo.budget import branch_budget, certain_branches, divide_by_logprob, divide_evenly
from megatron_dta.sampling.treepo.keys import Decision, QueryNumbers
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree

_WITH_OUTCOME = (EndReason.EOS, EndReason.ANSWER, EndReason.ENVIRONMENT)


@dataclass
class _Round:
    """The paths started by one decision; ``members`` is None until the decision is complete. Each path alive has
    ``certain`` children at least. ``all_end``: no path started so far can be alive after its segment, and a fallback
    does not depend on how they end."""

    members: int | None = None
    finished_before: int = 0
    finished: int = 0
    certain: int = 1
    all_end: bool = True
    alive: list[int] = field(default_factory=list)


class QueryPolicy:
    """Grows the tree of one query.

    Args:
        has_turns: whether an environment may continue a path after an end of sequence.

    Attributes:
        tree: the nodes so far.
        complete: whether no node is left to decode.
    """

    def __init__(self, prompt: np.ndarray, settings: TreeSettings, numbers: QueryNumbers, has_turns: bool) -> None:
        self.tree = SampledTree(numbers.query, prompt)
        self.complete = False
        self._settings, self._numbers = settings, numbers
        self._falls_back_early = settings.fallback == "random" and not has_turns
        self._rounds = [_Round()]
        self._current = 0  # the first round that is not complete

    def start(self) -> list[int]:
        """The first nodes to decode: children of the root."""
        low, high = self._settings.initial_branches, self._settings.initial_branches_max
        if high is not None:
            low = int(self._numbers.generator(Decision.INITIAL_BRANCHES).integers(low, high + 1))
        branches = min(low, self._settings.width)
        self._rounds[0].members = branches
        started = [self._child(0, 0) for _ in range(branches)]
        self._start_what_is_certain(started)
        return started

    def max_tokens(self, node: int) -> int:
        """Maximum number of tokens that the request of a new node may add."""
        tokens_left = self._tokens_left(self.tree.nodes[node].parent)
        return min(tokens_left, self._settings.segment_tokens or tokens_left)

    def advance(self, node: int) -> list[int]:
        """The new nodes to decode after ``node`` has been decoded (``tree.fill``) and its ``end`` is set."""
        tree_node = self.tree.nodes[node]
        tree_node.reported = True
        node_round = self._rounds[tree_node.round]
        started: list[int] = []
        if tree_node.end is not None:
            node_round.finished += 1
        else:
            assert not node_round.all_end, "a path goes on although it has the maximum length"
            node_round.alive.append(node)
            self._top_up(node, node_round.certain, started)
        self._start_what_is_certain(started)
        while not self.complete and self._is_complete(self._rounds[self._current]):
            self._decide(started)
        return started

    def needs_no_more_children(self, node: int) -> bool:
        """Whether a decoded node gets no more children. Fallback may add some until the tree is complete."""
        if self.complete or self.tree.nodes[node].end is not None:
            return True
        return self._settings.fallback == "none" and self.tree.nodes[node].round < self._current

    @staticmethod
    def _is_complete(round_: _Round) -> bool:
        return round_.members is not None and round_.finished + len(round_.alive) == round_.members

    def _start_what_is_certain(self, started: list[int]) -> None:
        """Start the children that living paths get regardless of the undecoded members of the current round, and those
        of a fallback that follows it in any case."""
        round_ = self._rounds[self._current]
        if round_.all_end:
            self._fall_back(started)
        if self._settings.allocation != "even" or not round_.alive or round_.members is None:
            return
        branches = certain_branches(self._settings, round_.finished_before, round_.members, round_.finished)
        if branches > round_.certain:
            round_.certain = branches
            for node in round_.alive:
                self._top_up(node, branches, started)

    def _decide(self, started: list[int]) -> None:
        """Finish the complete current round: give its living paths all their children, or fall back."""
        round_ = self._rounds[self._current]
        if round_.alive:
            alive = sorted(round_.alive, key=lambda index: self.tree.nodes[index].path)
            branches = self._divide(alive, round_, self._current)
            for node, count in zip(alive, branches.tolist(), strict=True):
                self._top_up(node, count, started)
            members = int(branches.sum())
        else:
            members = self._fall_back(started)
        self._current += 1
        if members == 0:
            self.complete = True
            return
        following = self._round(self._current)
        following.members, following.finished_before = members, round_.finished_before + round_.finished
        self._start_what_is_certain(started)

    def _divide(self, alive: list[int], round_: _Round, number: int) -> np.ndarray:
        """Number of children of each living path of a complete round, int [A]."""
        settings = self._settings
        budget = branch_budget(settings, round_.finished_before, round_.members, round_.finished)
        if settings.allocation == "even" and budget % len(alive) == 0:
            return np.full(len(alive), budget // len(alive))
        order = self._numbers.generator(Decision.REMAINDER, number).permutation(len(alive))
        if settings.allocation == "even":
            return divide_evenly(budget, order)
        scores = [self._score(node) for node in alive]
        return divide_by_logprob(budget, scores, settings.temperature, settings.allocation == "low-logprob", order)

    def _score(self, node: int) -> float:
        """The logprob that determines a path's share: the mean over its last segment."""
        tree_node = self.tree.nodes[node]
        return float(np.mean(tree_node.logprobs[: tree_node.num_sampled], dtype=np.float64))

    def _fall_back(self, started: list[int]) -> int:
        """Start a branch at a node of a finished path for each leaf that is missing when all paths of the current round
        have ended, unless they were started before; returns their number."""
        settings, number = self._settings, self._current
        round_, following = self._rounds[number], self._round(number + 1)
        missing = settings.width - round_.finished_before - round_.members
        if missing == 0 or settings.fallback == "none":
            return 0
        if following.members is None:
            following.members = missing
            leaves = [i for i, node in enumerate(self.tree.nodes) if node.end is not None or node.round == number]
            draw = self._numbers.generator(Decision.FALLBACK, number)
            for node in fallback_nodes(self.tree, leaves, missing, settings, draw):
                started.append(self._child(node, number + 1, fallback=True))
        return missing

    def _top_up(self, node: int, branches: int, started: list[int]) -> None:
        """Add children to a living path until it has ``branches``."""
        children = self.tree.nodes[node].children
        assert len(children) <= branches, "a path has been given more branches than it is due"
        while len(children) < branches:
            started.append(self._child(node, self.tree.nodes[node].round + 1))

    def _child(self, parent: int, round_number: int, fallback: bool = False) -> int:
        round_, tokens_left = self._round(round_number), self._tokens_left(parent)
        round_.all_end &= self._falls_back_early and (self._settings.segment_tokens or tokens_left) >= tokens_left
        return self.tree.add_child(parent, fallback, round_number)

    def _tokens_left(self, parent: int) -> int:
        return self._settings.max_response_tokens - self.tree.response_length(parent)

    def _round(self, number: int) -> _Round:
        while len(self._rounds) <= number:
            self._rounds.append(_Round())
        return self._rounds[number]


def fallback_nodes(
    tree: SampledTree, leaves: Sequence[int], missing: int, settings: TreeSettings, draw: np.random.Generator
) -> list[int]:
    """The parents of ``missing`` new children, one entry per child, after paths to ``leaves``; see the module's
    docstring."""
    leaves = sorted(leaves, key=lambda index: tree.nodes[index].path)
    if settings.fallback == "finished":
        leaves = [leaf for leaf in leaves if tree.nodes[leaf].end in _WITH_OUTCOME]
    if not leaves:
        return [0] * missing
    order = draw.permutation(len(leaves))
    chosen: list[int] = []
    while len(chosen) < missing:  # once through all candidates may not be enough
        for leaf in order:
            above = tree.lineage(leaves[leaf])[:-1]
            node = above[int(draw.integers(len(above)))]
            chosen += [node] * min(settings.branching_factor, missing - len(chosen))
    return chosen
