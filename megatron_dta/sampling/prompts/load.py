"""Reads prompts from JSONL and Parquet files, and shuffles them for training.

A row has one prompt, usually the answer that the reward compares against, and an optional ``id``:

    prompt, question   the prompt: text or, with a chat template, messages; --input-key names another field
    prompt_token_ids   the prompt as token ids
    answer             what the reward compares against; --label-key names another field, which becomes ``answer``
    reward_model       in verl's files: its ``ground_truth`` becomes ``answer`` if there is none
    tools              with a chat template: its tools, a list or the JSON text of one
    teacher            which of --teacher-load-hf scores its rollouts
    id                 a name that is unique in the file (default: the row's number)

The reward function gets all fields of the row as they are. A null field counts as missing; nulls in its value stay.

Each epoch is a keyed shuffle, so the prompts of a step are a function of the step number: a resumed run needs no reader
state, and step k of any run with the same seed and file trains the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_dta.common.keyed_random import keyed_permutation
from megatron_dta.common.rows import named_value, read_rows, value_at
from megatron_dta.core.common.errors import InputError
from megatron_dta.sampling.prompts.chat_template import ChatTemplate
from megatron_dta.sampling.prompts.messages import without_fillers
from megatron_dta.sampling.prompts.tokenizer import Tokenizer, checked_ids, encode_field

_FIELDS = ("prompt", "question", "prompt_token_ids")


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and the record that the reward function gets."""

    prompt_id: str
    token_ids: np.ndarray  # int32 [T], T >= 1
    record: Mapping[str, Any]  # the row of the file (or the generated problem), with its ``answer``

    @property
    def teacher(self) -> str | None:
        """The name of the teacher that scores its rollouts (``--teacher-load-hf``); None for the first one."""
        name = self.record.get("teacher")
        return name if isinstance(name, str) else None


class PromptReader:
    """Reads prompt files.

    Args:
        max_prompt_tokens: longer prompts are refused, or omitted with ``filter_overlong``; None: no limit.
        input_key, label_key: fields of the prompt and of its answer, which may be nested (``a.b``).

    Attributes:
        overlong: number of prompts omitted so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_prompt_tokens: int | None = None,
        template: ChatTemplate | None = None,
        input_key: str | None = None,
        label_key: str | None = None,
        filter_overlong: bool = False,
    ) -> None:
        self._tokenizer, self._limit, self._template = tokenizer, max_prompt_tokens, template
        self._input_key, self._label_key, self._filter = input_key, label_key, filter_overlong
        self.overlong = 0

    def read(self, path: str | Path) -> list[Prompt]:
        """All prompts of a file in order; ``InputError`` names file, row (from 1) and field of an invalid one."""
        file = Path(path)
        if not file.is_file():
            what = "is a folder; name its files" if file.is_dir() else "no such prompt file"
            raise InputError(f"{file}: {what}")
        prompts: list[Prompt] = []
        seen: dict[str, int] = {}
        before = self.overlong
        for row, record in read_rows(file):
            try:
                prompt = self._prompt(row, record, has_fillers=file.suffix == ".parquet")
                if prompt is None:
                    self.overlong += 1
                    continue
                first = seen.setdefault(prompt.prompt_id, row)
                if first != row:
                    raise InputError(f"id: {prompt.prompt_id!r} was already used in row {first}")
            except InputError as error:
                raise InputError(f"{file}: row {row}: {error}") from None
            prompts.append(prompt)
        if not prompts and self.overlong > before:
            raise InputError(
                f"{file}: all {self.overlong - before} prompts have more than {self._limit} tokens, which the model's "
                "positions leave; raise --max-position-embeddings or lower --rollout-max-response-len"
            )
        if not prompts:
            raise InputError(f"{file}: no prompts in it")
        return prompts

    def _prompt(self, row: int, record: dict[str, Any], has_fillers: bool) -> Prompt | None:
        """The prompt of a row; None if it is too long and omitted."""
        name = self._field(record)
        value, tools = value_at(record, name), record.get("tools")
        if has_fillers:
            value, tools = without_fillers(value), without_fillers(tools)
        if name == "prompt_token_ids":
            token_ids = _checked_ids(value, self._tokenizer)
        else:
            token_ids = self._encode(name, value, tools)
        if token_ids.size == 0:
            raise InputError(f"{name}: is empty; a response needs at least one token before it")
        if self._limit is not None and token_ids.size > self._limit:
            if self._filter:
                return None
            raise InputError(
                f"{name}: {token_ids.size} tokens, but the model's positions leave {self._limit}; raise "
                "--max-position-embeddings, lower --rollout-max-response-len, or leave such prompts out with "
                "--filter-overlong-prompts"
            )
        prompt_id = record["id"] if record.get("id") is not None else str(row)
        if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
            raise InputError(f"id: must be a string or an integer, got {type(prompt_id).__name__}")
        return Prompt(str(prompt_id), token_ids, MappingProxyType(self._with_answer(record)))

    def _field(self, record: dict[str, Any]) -> str:
        """Name of the prompt's field."""
        if self._input_key is not None:
            named_value(record, self._input_key, "--input-key")
            return self._input_key
        present = [name for name in _FIELDS if record.get(name) is not None]
        if len(present) != 1:
            raise InputError(
                f"needs exactly one of the fields {', '.join(_FIELDS)}, got {', '.join(present) or 'none'}; "
                "--input-key names another field"
            )
        return present[0]

    def _encode(self, name: str, value: Any, tools: Any) -> np.ndarray:
        if self._template is not None:
            try:
                value = self._template.prompt(value, tools)
            except InputError as error:
                raise InputError(f"{name}: {error}") from None
        return encode_field(self._tokenizer, name, value)

    def _with_answer(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record with the expected answer in ``answer``."""
        if self._label_key is not None:
            return {**record, "answer": named_value(record, self._label_key, "--label-key")}
        reward_model = record.get("reward_model")
        if (
            record.get("answer") is None
            and isinstance(reward_model, dict)
            and reward_model.get("ground_truth") is not None
        ):
            return {**record, "answer": reward_model["ground_truth"]}
        return record


def prompts_at(prompts: Sequence[Prompt], first: int, count: int, seed: int) -> list[Prompt]:
    """Prompts ``first`` .. ``first + count - 1`` of an endless stream of keyed shuffles, one per epoch."""
    order: list[Prompt] = []
    while len(order) < count:
        epoch, start = divmod(first + len(order), len(prompts))
        permutation = keyed_permutation(seed, epoch, len(prompts))
        order.extend(prompts[index] for index in permutation[start : start + count - len(order)])
    return order


def _checked_ids(ids: Any, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(ids, list) or any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise InputError("prompt_token_ids: must be a list of integers")
    try:
        return checked_ids(ids, tokenizer.vocab_size)
    except InputError as error:
        raise InputError(f"prompt_token_ids: {error}") from None
