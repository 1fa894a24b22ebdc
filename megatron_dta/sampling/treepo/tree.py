"""Defines the tree that is sampled for one query: nodes of decoded tokens, whose leaves are the rollouts.

The root (node 0) is the prompt. Every other node holds what one engine request added: the sampled tokens, followed by
the answer of an environment, which is context and never trained. A sequence consists of the nodes from the root to its
leaf, and the context of every request is built from the same nodes, so the recorded context of a node is always the one
that it was conditioned on.

**Leaf weights.** Walk down from the root and choose each child of a node with equal probability. The weight of a leaf
is the probability of ending there: the product of 1 / children over its path. If the root has two children, of which
one is a leaf and the other has two leaves below it, the weights are 1/2, 1/4 and 1/4.

If the number of children of a node is decided before any of its children is sampled, the weighted mean of any quantity
over the leaves is an unbiased estimate of its mean over independent rollouts. (Induction over the forks: given the path
up to a node, the expectation of each child's subtree is the value of the node, so their mean has the same expectation.)
The plain mean is biased, since longer paths branch more often.

Fallback breaks this premise, whichever node it chooses: it adds children to a node because all earlier paths ended
early. So leaves grown by fallback have weight 0, and the walk considers only the earlier children.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from megatron_dta.sampling.treepo.keys import node_key

_NO_TOKENS = np.zeros(0, np.int32)


class EndReason(Enum):
    """Why a path became a leaf."""

    EOS = "eos"  # an end of sequence was sampled
    ANSWER = "answer"  # its text contains an answer
    LENGTH = "length"  # the response has reached its maximum length
    ENVIRONMENT = "environment"  # the environment ended the episode
    ENVIRONMENT_FAILED = "environment_failed"  # a step raised, timed out or returned an invalid value


@dataclass(slots=True)
class TreeNode:
    """One node; ``token_ids`` is empty until its request has finished.

    Attributes:
        parent: index of the parent, -1 at the root.
        path: child numbers from the root down to this node.
        fallback: whether the node, or a node above it, was added by fallback.
        round: number of the budget round that the node belongs to (see ``policy``).
        key: key of its random numbers.
        token_ids: int32 [R], sampled tokens, then observed ones.
        logprobs: float [R], 0 for observed tokens.
        num_sampled: how many tokens were sampled.
        length: tokens from the beginning of the prompt to the end of this node.
        reward: reward received at the end of the node.
        end: why the path ends here, None for inner nodes.
        policy_version: version of the weights that sampled it.
        children: indices, in the order of their child numbers.
        reported: whether its request has finished.
        turn_ended: whether an environment has taken the sampled tokens up to here as an action.
    """

    parent: int
    path: tuple[int, ...]
    fallback: bool = False
    round: int = -1
    key: int = 0
    token_ids: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    logprobs: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    num_sampled: int = 0
    length: int = 0
    reward: float = 0.0
    end: EndReason | None = None
    policy_version: int = 0
    children: list[int] = field(default_factory=list)
    reported: bool = False
    turn_ended: bool = False


class SampledTree:
    """The tree of one query, growing or complete.

    Attributes:
        query: number of the query, which keys its random numbers.
        nodes: the root first; in a complete tree (``in_order``) in preorder.
    """

    def __init__(self, query: int, prompt: np.ndarray) -> None:
        prompt = np.asarray(prompt, dtype=np.int32)
        if prompt.size == 0:
            raise ValueError(f"query {query}: the prompt is empty")
        root = TreeNode(-1, (), token_ids=prompt, logprobs=np.zeros(prompt.size, np.float32), length=prompt.size)
        root.reported = True
        self.query = query
        self.nodes = [root]

    def add_child(self, parent: int, fallback: bool, round_number: int) -> int:
        """Add a node without tokens below ``parent`` and return its index."""
        above, index = self.nodes[parent], len(self.nodes)
        path = (*above.path, len(above.children))
        key = node_key(self.query, path)
        self.nodes.append(TreeNode(parent, path, fallback or above.fallback, round_number, key))
        above.children.append(index)
        return index

    def fill(self, index: int, token_ids: np.ndarray, logprobs: np.ndarray, policy_version: int) -> None:
        """Store the tokens that were sampled for a node."""
        node = self.nodes[index]
        node.token_ids, node.logprobs = np.asarray(token_ids, np.int32), np.asarray(logprobs)
        node.num_sampled, node.policy_version = len(node.token_ids), policy_version
        node.length = self.nodes[node.parent].length + len(node.token_ids)

    def observe(self, index: int, token_ids: np.ndarray, reward: float) -> None:
        """Append the environment's answer to the turn that ends in a node, and store the reward of that turn."""
        node = self.nodes[index]
        node.token_ids = np.concatenate([node.token_ids, np.asarray(token_ids, np.int32)])
        node.logprobs = np.concatenate([node.logprobs, np.zeros(len(token_ids), node.logprobs.dtype)])
        node.length += len(token_ids)
        node.reward, node.turn_ended = reward, True

    def lineage(self, index: int) -> list[int]:
        """Nodes from the root to ``index``, both included."""
        lineage = []
        while index >= 0:
            lineage.append(index)
            index = self.nodes[index].parent
        return lineage[::-1]

    def tokens(self, index: int) -> np.ndarray:
        """All tokens from the beginning of the prompt to the end of a node, int32: a leaf's sequence."""
        return np.concatenate([self.nodes[i].token_ids for i in self.lineage(index)])

    def response_length(self, index: int) -> int:
        """Number of tokens after the prompt, including observed ones."""
        return self.nodes[index].length - self.nodes[0].length

    def action(self, index: int) -> np.ndarray:
        """The sampled tokens of the turn that ends in a node, back to the end of the previous turn or the prompt."""
        pieces = []
        while index > 0:
            pieces.append(self.nodes[index].token_ids[: self.nodes[index].num_sampled])
            index = self.nodes[index].parent
            if self.nodes[index].turn_ended:
                break
        return np.concatenate(pieces[::-1])

    @property
    def leaves(self) -> list[int]:
        """Indices of the nodes where paths end, in the order of the nodes."""
        return [index for index, node in enumerate(self.nodes) if node.end is not None]

    @property
    def decoded_tokens(self) -> int:
        """Tokens that an engine sampled for this tree."""
        return sum(node.num_sampled for node in self.nodes)

    def in_order(self) -> SampledTree:
        """The complete tree with its nodes in preorder, independent of the order in which they finished."""
        order = sorted(range(len(self.nodes)), key=lambda index: self.nodes[index].path)
        new_index = {index: new for new, index in enumerate(order)}
        tree = SampledTree(self.query, self.nodes[0].token_ids)
        tree.nodes = [self.nodes[index] for index in order]
        for node in tree.nodes:
            node.parent = new_index.get(node.parent, -1)
            node.children = [new_index[child] for child in node.children]
        return tree

    def leaf_weights(self) -> dict[int, float]:
        """Weight of each leaf by its index; the weights sum to 1. See the module's docstring."""
        weight = [1.0] + [0.0] * (len(self.nodes) - 1)
        for node, of_node in zip(self.nodes, weight, strict=True):  # a node comes before its children
            children = [child for child in node.children if not self.nodes[child].fallback]
            for child in children:
                weight[child] = of_node / len(children)
        return {leaf: weight[leaf] for leaf in self.leaves}
