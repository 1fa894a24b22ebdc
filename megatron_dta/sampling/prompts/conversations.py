"""Encodes conversations as token ids with a mask of the assistant's turns, by rendering prefixes in the chat template.

For each trained turn of the assistant two prefixes of the conversation are rendered: up to the beginning of the turn,
as for sampling, and including the turn. The first must be a prefix of the second, and the second of the whole
conversation; the text between them is the turn. It is trained up to its end of sequence. What the template writes after
that (mostly a line break) is context. Turns that the file marks as untrained (``messages.MARKS``) are context, too.

A template may render a turn differently once others follow it; Qwen3's omits earlier thoughts. Then one sequence cannot
contain what the model sees at each turn, and one sample per turn (``turns``) is the exact form.

The ids are those of the whole text. If a token of it would cross the beginning of a turn, the two sides are encoded
apart, as in sampling, and counted (``crossings``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import PieceEncoder
from megatron_dta.sampling.prompts.messages import is_trained, text_of, words_to_continue
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


class MaskedTokens(NamedTuple):
    """Token ids (int32 [T]) and which of them are trained (bool [T])."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


class ConversationEncoder:
    """Encodes conversations (lists of messages with ``role`` and ``content``).

    Attributes:
        crossings: beginnings and ends of turns so far that a token of the whole text would cross.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template
        self.crossings = 0

    def whole(self, messages: list[Any], tools: Any = None, first: int = 0, continues: bool = False) -> MaskedTokens:
        """One sample up to the end of the last trained turn.

        Args:
            first: only turns from this message on are trained.
            continues: whether words of the assistant before ``first`` begin its turn; they are context.
        """
        talk = self._template.messages(messages)
        numbers = self._trained_turns(messages, talk, first)
        begun = None
        if continues and first == numbers[0] and words_to_continue(talk[:first]):
            begun, talk = talk[:first], _joined(talk, first)
            numbers = [number - 1 for number in numbers]
        rendered = {
            number: self._rendered(talk, number, tools, begun if number == numbers[0] else None) for number in numbers
        }
        _, text = rendered[numbers[-1]]
        ids, spans = PieceEncoder(self._tokenizer), []
        for number, (before, after) in rendered.items():
            if not text.startswith(after) or not before.startswith(ids.text):
                raise InputError(
                    f"message {number + 1}: the chat template writes this turn differently when others follow it, so "
                    "one sequence cannot hold what the model sees at every turn; give "
                    "--rollout-sample-granularity turn for one sample a turn"
                )
            spans.append(self._span(ids, before, after, number))
        self.crossings += ids.crossings
        return _masked(ids.token_ids[: spans[-1][1]], spans)

    def turns(self, messages: list[Any], tools: Any = None) -> list[MaskedTokens]:
        """One sample per trained turn: what the model sees before it, and the turn, which is trained."""
        talk, samples = self._template.messages(messages), []
        for number in self._trained_turns(messages, talk, 0):
            ids = PieceEncoder(self._tokenizer)
            span = self._span(ids, *self._rendered(talk, number, tools), number)
            self.crossings += ids.crossings
            samples.append(_masked(ids.token_ids[: span[1]], [span]))
        return samples

    def _trained_turns(self, messages: list[Any], talk: list[dict[str, Any]], first: int) -> list[int]:
        """Indices of the trained messages from ``first`` on.

        Args:
            messages: as they stand in the file; ``talk``: the same, normalized.
        """
        self._template.text(talk, generation_prompt=False)
        trained = []
        for index, message in enumerate(messages):
            try:
                if is_trained(message) and index >= first and talk[index]["role"] == "assistant":
                    trained.append(index)
            except InputError as error:
                raise InputError(f"message {index + 1}: {error}") from None
        if not trained:
            raise InputError("has no message of the assistant to train")
        if trained[0] == 0:
            raise InputError("message 1: is the assistant's; a turn needs a prompt before it")
        return trained

    def _rendered(
        self, talk: list[dict[str, Any]], number: int, tools: Any, begun: list[dict[str, Any]] | None = None
    ) -> tuple[str, str]:
        """The conversation up to the beginning of turn ``number``, and including the turn.

        Args:
            begun: the conversation up to the words that begin the turn, if it has some.
        """
        before = self._template.text(talk[:number], tools) if begun is None else self._template.prompt(begun, tools)
        after = self._template.text(talk[: number + 1], tools, generation_prompt=False)
        if not after.startswith(before) or after == before:
            raise InputError(
                f"message {number + 1}: the chat template begins the assistant's turn with {_tail(before)!r} when it "
                "is sampled, but writes it differently here; change the template, its --apply-chat-template-kwargs or "
                "the message"
            )
        return before, after

    def _span(self, ids: PieceEncoder, before: str, after: str, number: int) -> tuple[int, int]:
        """Add a turn and what precedes it to ``ids``; returns where it begins, and where its end of sequence ends."""
        for text in (before, after):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(f"is not valid text: {error}") from None
        begin = ids.extend(before)
        ids.extend(after)
        return begin, self._end(ids.token_ids, begin, number)

    def _end(self, ids: np.ndarray, begin: int, number: int) -> int:
        """Position after the end of sequence of the turn that begins at ``begin``."""
        ends = np.flatnonzero(np.isin(ids[begin:], list(self._tokenizer.ends)))
        if not ends.size:
            raise InputError(
                f"message {number + 1}: the chat template does not end the assistant's turn with the end of sequence "
                f"({', '.join(map(str, self._tokenizer.ends))}), so the model would not learn to stop; give the token "
                "that ends it with --eos-id"
            )
        return begin + int(ends[-1]) + 1


def _joined(talk: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """The conversation with message ``first`` as the end of the message before it."""
    begun, rest = talk[first - 1], talk[first]
    content = text_of(begun["content"]) + text_of(rest["content"])
    return [*talk[: first - 1], {**begun, **rest, "content": content}, *talk[first + 1 :]]


def _masked(ids: np.ndarray, spans: list[tuple[int, int]]) -> MaskedTokens:
    mask = np.zeros(len(ids), bool)
    for begin, end in spans:
        mask[begin:end] = True
    return MaskedTokens(ids, mask)


def _tail(text: str) -> str:
    return text[-40:]
