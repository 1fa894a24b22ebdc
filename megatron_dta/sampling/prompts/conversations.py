"""Encodes conversations as token ids with a mask of the assistant's turns, by rendering prefixes in the chat template.

For each turn of the assistant two prefixes of the conversation are rendered: up to the beginning of the turn, as for
sampling, and including the turn. The first must be a prefix of the second, and the second of the whole conversation;
the text between them is the turn. It is trained up to its end of sequence. What the template writes after that (mostly
a line break) is context.

A template may render a turn differently once others follow it; Qwen3's omits earlier thoughts. Then one sequence cannot
contain what the model sees at each turn, and one sample per turn (``turns``) is the exact form.

The whole text is encoded at once if the token ids of its prefixes are prefixes of the result. If a token would cross
the beginning of a turn, the two sides are encoded separately, as in sampling.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from megatron_dta.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.tokenizer import Tokenizer


class MaskedTokens(NamedTuple):
    """Token ids (int32 [T]) and which of them are trained (bool [T])."""

    token_ids: np.ndarray
    loss_mask: np.ndarray


class ConversationEncoder:
    """Encodes conversations (lists of messages with ``role`` and ``content``)."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer, self._template = tokenizer, template

    def whole(self, messages: list[Any], tools: Any = None, first: int = 0) -> MaskedTokens:
        """One sample up to the end of the last turn; all turns from message ``first`` on are trained."""
        numbers = self._assistant_turns(messages, first)
        text = self._template.text(messages[: numbers[-1] + 1], tools, generation_prompt=False)
        done, ids, spans = "", np.zeros(0, np.int32), []
        for number in numbers:
            before, after = self._rendered(messages, number, tools)
            if not text.startswith(after) or not before.startswith(done):
                raise InputError(
                    f"message {number + 1}: the chat template writes this turn differently when others follow it, so "
                    "one sequence cannot hold what the model sees at every turn; give "
                    "--rollout-sample-granularity turn for one "
                    "sample a turn"
                )
            ids = self._extended(ids, done, before)
            begin = len(ids)
            ids, done = self._extended(ids, before, after), after
            spans.append((begin, self._end(ids, begin, number)))
        return _masked(ids[: spans[-1][1]], spans)

    def turns(self, messages: list[Any], tools: Any = None) -> list[MaskedTokens]:
        """One sample per turn: what the model sees before it, and the turn, which is trained."""
        samples = []
        for number in self._assistant_turns(messages, 0):
            before, after = self._rendered(messages, number, tools)
            ids = self._extended(np.zeros(0, np.int32), "", before)
            begin = len(ids)
            ids = self._extended(ids, before, after)
            end = self._end(ids, begin, number)
            samples.append(_masked(ids[:end], [(begin, end)]))
        return samples

    def _assistant_turns(self, messages: list[Any], first: int) -> list[int]:
        """Indices of the assistant's messages from ``first`` on; the template checks the form of all messages."""
        if not isinstance(messages, list) or not messages:
            raise InputError(f"must be a list of messages, got {type(messages).__name__}")
        self._template.text(messages, generation_prompt=False)
        found = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
        if not found:
            raise InputError("has no message of the assistant to train")
        if found[0] == 0:
            raise InputError("message 1: is the assistant's; a turn needs a prompt before it")
        return found

    def _rendered(self, messages: list[Any], number: int, tools: Any) -> tuple[str, str]:
        """The conversation up to the beginning of turn ``number``, and including the turn."""
        before = self._template.text(messages[:number], tools)
        after = self._template.text(messages[: number + 1], tools, generation_prompt=False)
        if not after.startswith(before) or after == before:
            raise InputError(
                f"message {number + 1}: the chat template begins the assistant's turn with {_tail(before)!r} when it "
                "is sampled, but writes it differently here; change the template, its --apply-chat-template-kwargs or "
                "the message"
            )
        return before, after

    def _extended(self, ids: np.ndarray, done: str, text: str) -> np.ndarray:
        """Token ids of ``text`` that begin with ``ids``, the ids of its prefix ``done``."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"is not valid text: {error}") from None
        whole = self._tokenizer.encode(text)
        if len(whole) >= len(ids) and np.array_equal(whole[: len(ids)], ids):
            return whole
        return np.concatenate([ids, self._tokenizer.encode(text[len(done) :])])

    def _end(self, ids: np.ndarray, begin: int, number: int) -> int:
        """Position after the end of sequence of the turn that begins at ``begin``."""
        ends = np.flatnonzero(ids[begin:] == self._tokenizer.eos_id)
        if not ends.size:
            raise InputError(
                f"message {number + 1}: the chat template does not end the assistant's turn with the end of sequence "
                f"({self._tokenizer.eos_id}), so the model would not learn to stop; give the token that ends it with "
                "--eos-id"
            )
        return begin + int(ends[-1]) + 1


def _masked(ids: np.ndarray, spans: list[tuple[int, int]]) -> MaskedTokens:
    mask = np.zeros(len(ids), bool)
    for begin, end in spans:
        mask[begin:end] = True
    return MaskedTokens(ids, mask)


def _tail(text: str) -> str:
    return text[-40:]
