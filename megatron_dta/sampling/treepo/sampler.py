"""Samples the trees of many queries on one engine: submits the nodes that policies start and returns their results.

Each node is one request, whose context is built from the nodes above it. The requests of all queries run together, and
the children of a node are submitted in the same poll that returns the node.

The K/V of a node is held for its children until the node is known to be a leaf, or until its tree is complete: fallback
may return to it. (Without fallback, until it has all children of its round and they have finished.) If memory is short
the engine evicts what is held and computes the prefix again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_dta.sampling.environment import Environment, EnvironmentRunner, StepOutcome
from megatron_dta.sampling.interface import GenerationRequest, GenerationResult, RolloutEngine, phase
from megatron_dta.sampling.params import SamplingParams
from megatron_dta.sampling.treepo.keys import QueryNumbers
from megatron_dta.sampling.treepo.policy import QueryPolicy
from megatron_dta.sampling.treepo.settings import TreeSettings
from megatron_dta.sampling.treepo.stops import StopRules
from megatron_dta.sampling.treepo.tree import EndReason, SampledTree, TreeNode

Take = Callable[[Sequence[tuple[int, TreeNode, np.ndarray]]], None]


@dataclass(frozen=True)
class TreeQuery:
    """One query: its number, unique within the iteration and the key of its random numbers; its prompt and record."""

    number: int
    token_ids: np.ndarray
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Growing:
    """The state of one query: its policy, the nodes whose K/V is held, the environments after its turns, and tokens of
    nodes from the root on, with the number of those that were sampled."""

    policy: QueryPolicy
    held: set[int] = field(default_factory=set)
    environments: dict[int, Environment | None] = field(default_factory=dict)
    contexts: dict[int, tuple[np.ndarray, int]] = field(default_factory=dict)

    def context(self, node: int) -> tuple[np.ndarray, int]:
        """See ``contexts``."""
        if node not in self.contexts:
            tree_node = self.policy.tree.nodes[node]
            tokens, sampled = (np.zeros(0, np.int32), 0) if node == 0 else self.context(tree_node.parent)
            tokens = np.concatenate([tokens, tree_node.token_ids])
            self.contexts[node] = tokens, sampled + tree_node.num_sampled
        return self.contexts[node]


class TreeSampler:
    """Grows trees on an engine that ``sample`` starts.

    Args:
        environments: runs the environments of multi-turn queries; None: a response is one turn.

    Attributes:
        least_results: between two polls so many results are taken, or an eighth of the nodes that are not done if they
            are more: as many as a burst returns, and so few that a device soon goes on with what follows from them.
    """

    least_results = 128

    def __init__(
        self,
        engine: RolloutEngine,
        settings: TreeSettings,
        stops: StopRules | None = None,
        environments: EnvironmentRunner | None = None,
    ) -> None:
        self._engine, self._settings = engine, settings
        self._stops, self._environments = stops or StopRules(), environments
        self._nodes: dict[int, tuple[int, int]] = {}  # request -> (query's place, node)
        self._requests: dict[tuple[int, int], int] = {}
        self._growing: list[_Growing] = []

    def sample(
        self, queries: Sequence[TreeQuery], params: SamplingParams, iteration: int, take: Take | None = None
    ) -> list[SampledTree]:
        """The complete tree of each query, in order; a function of the arguments, the settings and the weights.

        ``take`` is called with leaves after each poll, while a device may run ahead: the place of its query, the leaf
        and its tokens.
        """
        self._begin(queries, params, iteration)
        waiting: list[GenerationResult] = []
        with phase(self._engine, params, iteration):
            self._submit([(i, node) for i, growing in enumerate(self._growing) for node in growing.policy.start()])
            while self._nodes:
                waiting += self._engine.poll(patient=not waiting)
                if not waiting:
                    raise RuntimeError(f"the engine has lost {len(self._nodes)} requests")
                most = max(self.least_results, len(self._nodes) // 8)
                leaves = self._take(waiting[:most])
                del waiting[:most]
                if take is not None and leaves:
                    take(leaves)
        assert all(growing.policy.complete for growing in self._growing)
        trees, self._growing = [growing.policy.tree for growing in self._growing], []
        return trees

    def _begin(self, queries: Sequence[TreeQuery], params: SamplingParams, iteration: int) -> None:
        self._nodes, self._requests = {}, {}
        prompts, states = [query.token_ids for query in queries], [None] * len(queries)
        if has_turns := self._environments is not None:
            states, observations = self._environments.reset([query.record for query in queries], prompts)
            prompts = [np.concatenate(pair) for pair in zip(prompts, observations, strict=True)]
        numbers = [QueryNumbers(params, iteration, query.number) for query in queries]
        self._growing = [
            _Growing(QueryPolicy(prompt, self._settings, keyed, has_turns), environments={0: state})
            for prompt, keyed, state in zip(prompts, numbers, states, strict=True)
        ]

    def _submit(self, started: Sequence[tuple[int, int]]) -> None:
        """Submit the requests of new nodes."""
        requests = []
        for query, node in started:
            growing = self._growing[query]
            tree = growing.policy.tree
            above = tree.nodes[node].parent
            tokens, sampled_before = growing.context(above)
            request_id = len(self._requests)
            self._requests[query, node] = request_id
            self._nodes[request_id] = (query, node)
            parent = above
            while parent > 0 and parent not in growing.held:
                parent = tree.nodes[parent].parent
            parent = parent or min(growing.held, default=0)  # all nodes have computed the prompt
            requests.append(GenerationRequest(
                request_id, tokens, growing.policy.max_tokens(node), tree.nodes[node].key, hold=True,
                parent=self._requests[query, parent] if parent > 0 else None,
                prompt_length=tree.nodes[0].length, sampled_before=sampled_before,
            ))  # fmt: skip
        if requests:
            self._engine.submit(requests)

    def _take(self, results: Sequence[GenerationResult]) -> list[tuple[int, TreeNode, np.ndarray]]:
        """Store results in their trees and start the nodes that follow from them. Returns the leaves among them."""
        decoded: list[tuple[int, int, bool]] = []
        for result in results:
            query, node = self._nodes.pop(result.request_id)
            growing = self._growing[query]
            growing.policy.tree.fill(node, result.token_ids, result.logprobs, result.policy_version)
            growing.held.add(node)
            decoded.append((query, node, result.ended))
        outcomes = self._step([(query, node) for query, node, ended in decoded if ended])
        started = []
        for query, node, ended in decoded:
            policy = self._growing[query].policy
            policy.tree.nodes[node].end = self._end_of(policy.tree, node, ended, outcomes.get((query, node)))
            started += [(query, child) for child in policy.advance(node)]
        self._submit(started)
        nodes_of: dict[int, list[int]] = {}
        for query, node, _ in decoded:
            nodes_of.setdefault(query, []).append(node)
        self._engine.release([i for query in sorted(nodes_of) for i in self._over(query, nodes_of[query])])
        grown = [(query, node, self._growing[query]) for query, node, _ in decoded]
        leaves = [(i, g.policy.tree.nodes[n], g.context(n)[0]) for i, n, g in grown if g.policy.tree.nodes[n].end]
        for policy in (self._growing[query].policy for query in nodes_of):
            if policy.complete:  # while a device may go on with other queries
                policy.tree = policy.tree.in_order()
        return leaves

    def _end_of(self, tree: SampledTree, node: int, ended: bool, outcome: StepOutcome | None) -> EndReason | None:
        """Why the path ends at ``node``, or None; adds the observation to the tree if the path continues."""
        settings = self._settings
        if outcome is None:
            return self._stops.end_of(tree, node, ended, settings.max_response_tokens)
        if outcome.failure is not None:
            return EndReason.ENVIRONMENT_FAILED
        end = EndReason.ENVIRONMENT if outcome.done else None
        # An observation to which the model will not respond is left out.
        tokens_left = settings.max_response_tokens - tree.response_length(node)
        if end is None and len(outcome.observation) >= tokens_left:
            end = EndReason.LENGTH
        tree.observe(node, outcome.observation[:0] if end else outcome.observation, outcome.reward)
        return end or self._stops.end_of(tree, node, False, settings.max_response_tokens)

    def _step(self, turns: Sequence[tuple[int, int]]) -> dict[tuple[int, int], StepOutcome]:
        """Pass finished turns to the environments of the nodes where the turns started."""
        if not turns or self._environments is None:
            return {}
        states, actions = [], []
        for query, node in turns:
            growing = self._growing[query]
            above = next(i for i in growing.policy.tree.lineage(node)[-2::-1] if i in growing.environments)
            states.append(growing.environments[above])
            actions.append(growing.policy.tree.action(node))
        after, outcomes = self._environments.step(states, actions)
        for (query, node), state in zip(turns, after, strict=True):
            self._growing[query].environments[node] = state
        return dict(zip(turns, outcomes, strict=True))

    def _over(self, query: int, decoded: Sequence[int]) -> list[int]:
        """The requests of nodes that get no more children, after the nodes ``decoded``; they are held no longer."""
        growing = self._growing[query]
        policy, nodes = growing.policy, growing.policy.tree.nodes
        # With fallback all nodes but leaves are kept until the tree is complete.
        candidates = decoded if self._settings.fallback != "none" and not policy.complete else growing.held
        over = [
            node
            for node in sorted(candidates)
            if policy.needs_no_more_children(node) and all(nodes[child].reported for child in nodes[node].children)
        ]
        growing.held.difference_update(over)
        return [self._requests[query, node] for node in over]
