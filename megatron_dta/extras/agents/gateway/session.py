"""The tree of a session: every call as (prompt ids, output ids, logprobs, version), each token stored once.

A node holds the new part of a prompt, or an answer. It begins with a known prefix, the first ``base_length`` tokens up
to the end of an earlier node. Only the text after that prefix is tokenized. Where a prompt continues an earlier
answer, the prefix includes the answer's ids as they were sampled. Where the history was changed (stripped reasoning,
compaction, another system prompt), the longest prefix that is unchanged ends earlier, and the call is a branch.

    prompt A | answer A | tool result | answer B          the tool result begins with the end of answer A
                        | other question | answer C       and so does the other question
               answer D                                   a retry: the prompt is known as a whole
    system of A | summary | answer E                      after a compaction: the first tokens of prompt A
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import numpy as np

from megatron_dta.extras.agents.gateway.prefix_index import PrefixIndex


@dataclass(frozen=True, eq=False)
class Node:
    """Tokens after a known prefix: the new part of a prompt, or an answer (``Call``).

    Attributes:
        base: the node that it begins with; None: it begins with nothing known.
        base_length: number of tokens that it has from ``base`` and those before it.
        new_ids: int32 [C], its tokens after those.
    """

    base: Node | None
    base_length: int
    new_ids: np.ndarray

    @property
    def length(self) -> int:
        """Tokens up to the end of the node."""
        return self.base_length + len(self.new_ids)

    @property
    def parent(self) -> Call | None:
        """The latest call whose whole answer comes before this node; None for the first one of a branch."""
        node, known = self.base, self.base_length
        while node is not None and (node.length > known or not isinstance(node, Call)):
            known = min(known, node.base_length)
            node = node.base
        return node

    def token_ids(self, length: int | None = None) -> np.ndarray:
        """The first ``length`` tokens up to the end of the node (default: all), int32."""
        pieces, node, left = [], self, self.length if length is None else length
        while node is not None and left > 0:
            pieces.append(node.new_ids[: max(0, left - node.base_length)])
            left = min(left, node.base_length)
            node = node.base
        return np.concatenate(pieces[::-1]) if pieces else np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class Call(Node):
    """One answer of the model; ``base`` is its prompt, and ``new_ids`` the answer as it was sampled.

    Attributes:
        number: place in the session, from 0.
        call_id: the id that the client received.
        logprobs: float32 or float64 [R].
        finish: why the answer ended: stop, length, stop_sequence or tool_calls.
        seconds: time from the request to the end of the answer.
        tools: the names of the tools that the answer calls.
    """

    number: int
    call_id: str
    logprobs: np.ndarray
    policy_version: int
    finish: str = "stop"
    seconds: float = 0.0
    tools: tuple[str, ...] = ()

    @property
    def prompt_length(self) -> int:
        return self.base_length

    @property
    def output(self) -> np.ndarray:
        """int32 [R]: the answer."""
        return self.new_ids


@dataclass(frozen=True)
class Base:
    """The value of a known prefix: the first ``length`` tokens up to the end of ``node``."""

    node: Node
    length: int


@dataclass
class SessionCounts:
    """What a session has seen.

    Attributes:
        tokenized_tokens: context tokens that came from a tokenizer.
        crossed_borders: prompts whose whole text would have a token across the end of what the session knew.
        reused_tokens: prompt tokens that were known, sampled ones among them.
        abandoned_calls: answers that their clients did not wait for; they are not part of the tree.
    """

    tokenized_tokens: int = 0
    crossed_borders: int = 0
    reused_tokens: int = 0
    abandoned_calls: int = 0


@dataclass(eq=False)
class Session:
    """A session: its tree and its rewards.

    Attributes:
        session_id: part of the key, no secret.
        number: decides the random numbers of its answers.
        texts, ids: known prefixes, by UTF-8 text and by token ids.
        reasoning: what the model thought in an answer, by a digest of what else the client received of it.
        rewards: rewards of calls, by number.
        held: requests whose K/V the engine keeps, by the number of the call.
        talks: the calls whose answer a known beginning of a conversation ends with, by its digest (``branches``).
        prompts, continued: nodes that are prompts of calls, and calls that others continue.
        branches: why a call begins a branch, by its number.
    """

    session_id: str
    number: int
    secret: str
    group_id: str = "0"
    opened: float = field(default_factory=time.monotonic)
    calls: list[Call] = field(default_factory=list)
    texts: PrefixIndex[Base] = field(default_factory=PrefixIndex)
    ids: PrefixIndex[Base] = field(default_factory=PrefixIndex)
    reasoning: dict[bytes, str] = field(default_factory=dict)
    reward: float | None = None
    rewards: dict[int, float] = field(default_factory=dict)
    counts: SessionCounts = field(default_factory=SessionCounts)
    asked: dict[bytes, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    talks: dict[bytes, list[Call]] = field(default_factory=dict)
    prompts: set[Node] = field(default_factory=set)
    continued: set[Call] = field(default_factory=set)
    branches: dict[int, str] = field(default_factory=dict)
    running: int = 0
    num_tokens: int = 0
    is_open: bool = True
    last_text: str = ""

    def add(self, call: Call) -> None:
        """Append a finished call."""
        self.calls.append(call)
        self.num_tokens += len(call.new_ids)

    def random_key(self, prompt_ids: np.ndarray) -> int:
        """The key of the random numbers of one more answer to this prompt, in [0, 2^63).

        It depends on the session's number, the prompt and how often it was asked before, not on the order of calls.
        """
        digest = hashlib.blake2b(prompt_ids.astype(np.int32).tobytes(), digest_size=16).digest()
        self.asked[digest] = self.asked.get(digest, -1) + 1
        key_bytes = hashlib.blake2b(digest + b"%d,%d" % (self.number, self.asked[digest]), digest_size=8).digest()
        return int.from_bytes(key_bytes, "little") >> 1

    def held_before(self, node: Node | None) -> int | None:
        """The held request of the latest call that shares a prefix with ``node``; None if there is none."""
        while node is not None:
            if isinstance(node, Call) and node.number in self.held:
                return self.held[node.number]
            node = node.base
        return None

    def call_of(self, call_id: str) -> Call | None:
        """The call that the client knows by this id."""
        return next((call for call in self.calls if call.call_id == call_id), None)
