"""Reads text as stored rollouts: conversations and responses for supervised training, preferences for DPO.

The rows of a file (JSONL or Parquet) have one of these forms; other fields are ignored.

    messages                     a conversation; the turns of the assistant are trained (or another --input-key)
    conversations, system        the same in ShareGPT's form
    prompt, response             the response is trained; also question and completion (--input-key, --label-key)
    prompt, chosen, rejected     for DPO: text, or messages that follow the prompt
    chosen, rejected             for DPO: two conversations, whose common prefix is the prompt
    tools                        with any of them: tools of the chat template

Turns that a message marks as untrained (``messages.MARKS``) are context, and a prompt that ends with words of the
assistant is continued. With --apply-chat-template text is a message. Without it, prompt and response are encoded
unchanged, as one text, and the end of sequence is appended. A preference becomes two rollouts of one group, with
rewards 1 and 0.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from megatron_dta.common.rows import field_names, named_value, read_rows, value_at
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.lines import data_suffix
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.core.rollouts.sample_granularity import cut_length
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.continuation import encode_after
from megatron_dta.sampling.prompts.conversations import ConversationEncoder, MaskedTokens
from megatron_dta.sampling.prompts.messages import with_role, without_fillers
from megatron_dta.sampling.prompts.tokenizer import Tokenizer, encode_field

logger = logging.getLogger(__name__)

_TALKS, _PROMPTS, _RESPONSES = ("messages", "conversations"), ("prompt", "question"), ("response", "completion")


def holds_text(path: str | Path, input_key: str | None = None) -> bool:
    """Whether the rows of a file are text instead of token ids."""
    path = Path(path)
    if data_suffix(path) not in (".jsonl", ".json", ".parquet"):
        return False
    names = field_names(path)
    known = {*_TALKS, "chosen", *_PROMPTS, *_RESPONSES, *((input_key or "").split(".")[:1])}
    return "token_ids" not in names and bool(names & known)


class TextReader:
    """Reads files of text.

    Args:
        template: the chat template, if it is applied.
        sample_granularity: one sample per conversation ("trajectory") or per turn of the assistant ("turn").
        max_length: longer samples are cut; those without a remaining trained token are dropped, which is logged.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        input_key: str | None = None,
        label_key: str | None = None,
        sample_granularity: str = "trajectory",
        max_length: int | None = None,
    ) -> None:
        self.tokenizer, self._template = tokenizer, template
        self._encoder = None if template is None else ConversationEncoder(tokenizer, template)
        self._input_key, self._label_key = input_key, label_key
        self._framing, self._max_length = sample_granularity, max_length
        self._plain_crossings = 0

    def read(self, path: str | Path, pairs: bool) -> list[Rollout]:
        """The rollouts of a file; ``InputError`` names file, row (from 1) and field of an invalid row.

        Args:
            pairs: whether the rows must be preferences; otherwise they must not be.
        """
        path, rollouts, cut_away, crossings = Path(path), [], 0, self._crossings
        for row, record in read_rows(path):
            try:
                record = without_fillers(record) if path.suffix == ".parquet" else record
                row_rollouts = self._rollouts(row, record, pairs)
            except InputError as error:
                raise InputError(f"{path}: row {row}: {error}") from None
            kept = row_rollouts
            if self._max_length is not None:
                kept = [cut for rollout in row_rollouts if (cut := cut_length(rollout, self._max_length)) is not None]
            if pairs and len(kept) < len(row_rollouts):
                kept = []
            cut_away += len(row_rollouts) - len(kept)
            rollouts += kept
        if cut_away:
            logger.warning(
                "%s: left out %d samples: no trained token in their first %d", path, cut_away, self._max_length
            )
        if self._crossings > crossings:
            logger.warning(
                "%s: tokens of the whole text would cross %d borders of turns or responses; the two sides are encoded "
                "apart, as in sampling",
                path,
                self._crossings - crossings,
            )
        if not rollouts:
            reason = f"no sample has a trained token in its first {self._max_length} tokens" if cut_away else "no rows"
            raise InputError(f"{path}: {reason}")
        return rollouts

    @property
    def _crossings(self) -> int:
        return self._plain_crossings + (self._encoder.crossings if self._encoder is not None else 0)

    def _rollouts(self, row: int, record: dict[str, Any], pairs: bool) -> list[Rollout]:
        tools = record.get("tools")
        if pairs != any(record.get(name) is not None for name in ("chosen", "rejected")):
            raise InputError(
                "--objective dpo needs the fields chosen and rejected"
                if pairs
                else "has chosen and rejected answers, which only --objective dpo trains"
            )
        if pairs:
            samples = self._pair(record, tools)
            return [
                Rollout(*sample, reward=reward, group_id=f"row {row}", trajectory_id=None)
                for sample, reward in zip(samples, (1.0, 0.0), strict=True)
            ]
        return [
            Rollout(*sample, group_id=f"row {row}", trajectory_id=f"row {row}" if self._framing == "turn" else None)
            for sample in self._samples(record, tools)
        ]

    def _samples(self, record: dict[str, Any], tools: Any) -> list[MaskedTokens]:
        """The samples of a row for supervised training."""
        name = self._input_key or next((n for n in (*_TALKS, *_PROMPTS) if record.get(n) is not None), "messages")
        value = value_at(record, name)
        if value is None:
            fields = ", ".join(map(repr, record))
            raise InputError(f"needs messages, or prompt and response; has no field '{name}', but {fields}")
        if name == "conversations" and isinstance(value, list) and record.get("system"):
            value = [{"role": "system", "content": record["system"]}, *value]  # as files of ShareGPT have it
        answer = self._label_key
        if answer is None and (name in _PROMPTS or not _is_answered(value)):
            answer = next((n for n in _RESPONSES if record.get(n) is not None), None)
        if answer is None and isinstance(value, str):
            raise InputError(f"{name}: is text and needs a response; --label-key names its field")
        label = None if answer is None else named_value(record, answer, "--label-key")
        if self._encoder is None:
            return [self._plain(name, value, answer, label)]
        messages = _named(name, lambda: _as_messages(value, "user"))
        first = 0
        if answer is not None:
            first = len(messages)
            messages = messages + _named(answer, lambda: _as_messages(label, "assistant"))
        if self._framing == "turn" and not first:
            return _named(name, lambda: self._encoder.turns(messages, tools))
        return [_named(name, lambda: self._encoder.whole(messages, tools, first, continues=bool(first)))]

    def _pair(self, record: dict[str, Any], tools: Any) -> list[MaskedTokens]:
        """The chosen and the rejected sequence of a row, what follows their prompt trained."""
        if self._framing == "turn":
            raise InputError("--rollout-sample-granularity turn cuts what --objective dpo compares; leave it out")
        for name in ("chosen", "rejected"):
            if record.get(name) is None:
                raise InputError(f"has no field '{name}'")
        name = self._input_key or next((n for n in (*_PROMPTS, "conversations") if record.get(n) is not None), None)
        prompt = None if name is None else named_value(record, name, "--input-key")
        if self._encoder is None:
            if prompt is None:
                raise InputError("needs a prompt, chosen and rejected (conversations need --apply-chat-template)")
            return [self._plain(name, prompt, answer, record[answer]) for answer in ("chosen", "rejected")]
        both = [
            _named(answer, lambda answer=answer: _as_messages(record[answer], "assistant"))
            for answer in ("chosen", "rejected")
        ]
        if prompt is not None:
            context = _named(name, lambda: _as_messages(prompt, "user"))
            # Files may repeat the prompt in both conversations.
            both = [talk if self._same(talk[: len(context)], context) else context + talk for talk in both]
            first = len(context)
        else:
            first = len(list(takewhile(lambda pair: self._same(pair[:1], pair[1:]), zip(*both, strict=False))))
        if self._same(both[0][first:], both[1][first:]):
            raise InputError("chosen and rejected are the same")
        return [
            _named(answer, lambda talk=talk: self._encoder.whole(talk, tools, first, continues=prompt is not None))
            for answer, talk in zip(("chosen", "rejected"), both, strict=True)
        ]

    def _same(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        """Whether two lists of messages are equal once they are normalized."""
        pairs = zip(first, second, strict=False)
        assert self._template is not None
        form = self._template.messages
        return len(first) == len(second) and all(a == b or form([a]) == form([b]) for a, b in pairs)

    def _plain(self, name: str, prompt: Any, answer: str | None, response: Any) -> MaskedTokens:
        """Prompt, response and end of sequence, without a chat template."""
        before = encode_field(self.tokenizer, name, prompt)
        if not before.size:
            raise InputError(f"{name}: is empty; a response needs at least one token before it")
        encode_field(self.tokenizer, answer or "", response)
        trained, crosses = encode_after(self.tokenizer, prompt, response)
        self._plain_crossings += crosses
        if not trained.size or trained[-1] not in self.tokenizer.ends:
            trained = np.append(trained, np.int32(self.tokenizer.eos_id))
        ids = np.concatenate([before, trained])
        return MaskedTokens(ids, np.arange(len(ids)) >= len(before))


def _as_messages(value: Any, role: str) -> list[Any]:
    """A list of messages; text becomes one message of ``role``."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise InputError(f"must be text or a list of messages, got {type(value).__name__}")
    return [with_role(message) for message in value]


def _is_answered(value: Any) -> bool:
    """Whether a prompt is a whole conversation that ends with the assistant."""
    last = value[-1] if isinstance(value, list) and value else None
    return isinstance(last, dict) and with_role(last).get("role") == "assistant"


def _named(name: str, call: Any) -> Any:
    """The result of ``call``; its ``InputError`` is prefixed with the field."""
    try:
        return call()
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
