"""Turns a request's messages, text or ids into prompt ids, and reuses every token that the session knows.

The template writes the whole conversation as text. The longest known prefix of that text brings its ids with it; only
the rest is tokenized. Known are: prompts, as a whole and up to each special token (no tokenizer merges across one), and
prompts with their answers, in the form in which the template repeats the answer. The ids after such a prefix are the
sampled ones, also where the template writes an answer a little differently (blanks in the JSON of a tool call). The
rest is encoded as it would be in the whole text (``prompts.continuation``).

An answer is only known if the template, asked at once, repeats it after the unchanged prompt with its reasoning. If a
later turn makes it drop the reasoning, the text differs there and the call is a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.extras.agents.gateway.errors import exhausted, refuse
from megatron_dta.extras.agents.gateway.messages import Answer, template_messages, visible_digest
from megatron_dta.extras.agents.gateway.session import Base, Call, Node, Session
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import Continuation, encode_after, text_before
from megatron_dta.sampling.prompts.messages import text_of, words_to_continue
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


@dataclass(frozen=True)
class GatewayPrompt:
    """The prompt of a call.

    Attributes:
        token_ids: int32 [T].
        node: its end in the session's tree.
        known: number of its tokens that the session had already.
        known_bytes: bytes of ``content`` that these tokens are.
        content: the text as UTF-8, or the ids as int32 bytes.
        is_text: which of the two.
        messages, tools: the conversation, if the prompt is one.
    """

    token_ids: np.ndarray
    node: Node
    known: int
    known_bytes: int
    content: bytes
    is_text: bool
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None


class PromptBuilder:
    """Builds prompts.

    Args:
        template: the chat template; None: requests with messages are refused.
        max_tokens: the longest prompt.
        max_session_tokens: a session that holds more is refused any prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, max_tokens: int, max_session_tokens: int
    ) -> None:
        self._tokenizer, self._template, self._max_tokens = tokenizer, template, max_tokens
        self._max_session_tokens = max_session_tokens

    def chat(self, session: Session, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> GatewayPrompt:
        """The prompt of a conversation; ``RequestError`` if the template refuses it or it is too long."""
        if self._template is None:
            raise refuse("messages need a chat template: start the gateway with --apply-chat-template")
        written = template_messages(messages, session, self._template)
        return self._of_text(session, self._rendered(self._template.prompt, written, tools), written, tools)

    def text(self, session: Session, text: str) -> GatewayPrompt:
        return self._of_text(session, text, None, None)

    def ids(self, session: Session, token_ids: Sequence[int]) -> GatewayPrompt:
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._tokenizer.vocab_size:
            raise refuse(f"prompt: token ids must be in [0, {self._tokenizer.vocab_size}) and at least one")
        array = np.array(token_ids, np.int32)
        content = array.tobytes()
        length, base = session.ids.find(content) or (0, None)
        node = self._node(session, base, array, array[0 if base is None else base.length :])
        session.ids.add(content, [(len(content), Base(node, node.length))])
        return GatewayPrompt(array, node, 0 if base is None else base.length, length, content, False)

    def remember(self, session: Session, prompt: GatewayPrompt, call: Call, text: str, answer: Answer | None) -> None:
        """Make the answer of a finished call known.

        Args:
            text: the answer as text, with the stop string that has ended it: clients put it back that read it.
            answer: the message of this text, for conversations.
        """
        if not prompt.is_text:
            token_ids = call.token_ids().tobytes()
            session.ids.add(token_ids, [(len(token_ids), Base(call, call.length))])
            return
        for repeated, length in self._repeated(prompt, call, text, answer):
            content = repeated.encode()
            session.texts.add(content, [(len(content), Base(call, length))])
        if answer is not None and answer.reasoning is not None:
            session.reasoning[visible_digest(answer.message())] = answer.reasoning

    def _repeated(self, prompt: GatewayPrompt, call: Call, text: str, answer: Answer | None) -> list[tuple[str, int]]:
        """The text of prompt and answer as a later prompt may begin with it, and the number of its tokens; nothing if
        the template alters it."""
        before = prompt.content.decode()
        if answer is None or prompt.messages is None:
            return [(before + text, call.length)]
        assert self._template is not None
        begun, message = prompt.messages, answer.message()
        if words_to_continue(begun):  # clients send them back with the answer, as one message
            message["content"] = text_of(begun[-1]["content"]) + message["content"]
            begun = begun[:-1]
        rendered = self._rendered(self._template.text, [*begun, message], prompt.tools, generation_prompt=False)
        if not rendered.startswith(before):
            return []
        repeated = rendered[len(before) :]
        end, written = max(((repeated.rfind(text), token) for token, text in self._ends.items()), default=(-1, -1))
        thought = _thought(text, answer)
        if thought and "".join(thought.split()) not in "".join(repeated.split()):
            return []
        sampled = int(call.output[-1])
        if end >= 0 and sampled == written:
            return [(before + repeated[: end + len(self._ends[written])], call.length)]
        # An end that the template does not write ends the call's branch; the client never saw it as text.
        whole = before + (repeated if end < 0 else repeated[:end])
        known = [(whole, call.length - (sampled in self._ends))]
        # Where templates write no end, the next turn's role ends an answer (GLM).
        return [*known, (whole + self._ends[sampled], call.length)] if end < 0 and sampled in self._ends else known

    def _of_text(
        self, session: Session, text: str, messages: list[dict[str, Any]] | None, tools: list[Any] | None
    ) -> GatewayPrompt:
        content = text.encode("utf-8", "replace")
        length, base = session.texts.find(content) or (0, None)
        # A tokenizer needs seconds for megabytes, during which nobody else is answered.
        if len(content) - length > _MOST_BYTES_PER_TOKEN * self._max_tokens:
            raise refuse(f"the prompt has {len(content)} bytes; there is room for {self._max_tokens} tokens")
        known_ids = _NONE if base is None else base.node.token_ids(base.length)
        try:
            rest, crosses = self._encode(known_ids, content[length:].decode())
        except InputError as error:
            raise refuse(f"prompt: {error}") from error
        token_ids = np.concatenate([known_ids, rest])
        node = self._node(session, base, token_ids, rest)
        session.counts.tokenized_tokens += len(rest)
        session.counts.crossed_borders += crosses
        known = len(token_ids) - len(rest)
        prompt = GatewayPrompt(token_ids, node, known, length, content, True, messages, tools)
        if len(rest):
            session.texts.add(content, self._boundaries(prompt))
        return prompt

    def _encode(self, known: np.ndarray, text: str) -> Continuation:
        """The ids of ``text`` after the known ones."""
        return encode_after(self._tokenizer, text_before(self._tokenizer, known) if text else "", text)

    def _node(self, session: Session, base: Base | None, token_ids: np.ndarray, rest: np.ndarray) -> Node:
        """The node at the end of a prompt: a new one, unless nothing in it is new."""
        if not token_ids.size:
            raise refuse("prompt: is empty")
        if session.num_tokens > self._max_session_tokens:
            raise exhausted(f"holds {session.num_tokens} tokens, more than it may (gateway_max_session_tokens)")
        if len(token_ids) > self._max_tokens:
            raise refuse(
                f"the prompt has {len(token_ids)} tokens; there is room for {self._max_tokens} "
                "(--max-position-embeddings)"
            )
        session.counts.reused_tokens += len(token_ids) - len(rest)
        session.num_tokens += len(rest)
        if base is not None and not len(rest) and base.length == base.node.length:
            return base.node
        return Node(None if base is None else base.node, 0 if base is None else base.length, rest)

    def _boundaries(self, prompt: GatewayPrompt) -> list[tuple[int, Base]]:
        """(bytes, base) of the prefixes of a prompt that end at its special tokens, and of the prompt itself.

        Only the part after the known prefix is new. Special tokens are found in the ids and then, in the same order,
        in the text; if the text lacks one, the ones after it are left out.
        """
        boundaries: list[tuple[int, Base]] = []
        known, at, node = prompt.known, prompt.known_bytes, prompt.node
        for index, token in enumerate(prompt.token_ids[known:].tolist(), start=known):
            special = self._special.get(token)
            if special is None:
                continue
            begin = prompt.content.find(special, at)
            if begin < 0:
                break
            if begin > at and index > known:
                boundaries.append((begin, Base(node, index)))
            at = begin + len(special)
            boundaries.append((at, Base(node, index + 1)))
        if not boundaries or boundaries[-1][0] < len(prompt.content):
            boundaries.append((len(prompt.content), Base(node, node.length)))
        return boundaries

    @staticmethod
    def _rendered(render: Callable[..., str], *arguments: Any, **ends: bool) -> str:
        try:
            return render(*arguments, **ends)
        except InputError as error:
            raise refuse(f"messages: {error}") from error

    @cached_property
    def _ends(self) -> dict[int, str]:
        """The texts of the special tokens that end an answer."""
        texts = ((token, self._tokenizer.special_text(token)) for token in self._tokenizer.ends)
        return {token: text for token, text in texts if text}

    @cached_property
    def _special(self) -> dict[int, bytes]:
        """The special tokens' texts."""
        texts = ((token, self._tokenizer.special_text(token)) for token in range(self._tokenizer.vocab_size))
        return {token: text.encode() for token, text in texts if text}


_NONE = np.zeros(0, np.int32)
_MOST_BYTES_PER_TOKEN = 64


def _thought(text: str, answer: Answer) -> str:
    """The reasoning of an answer, wherever the client receives it."""
    if answer.reasoning is not None:
        return answer.reasoning
    before, mark, _ = text.partition("</think>")
    return before.rpartition("<think>")[2] if mark else ""
