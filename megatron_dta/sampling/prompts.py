"""Prompts from a JSONL file, and the order in which training visits them.

A row is an object with the prompt as text (``prompt`` or ``question``) or as ids (``prompt_token_ids``), usually with
the ``answer`` that the reward compares against, and an optional ``id``. Every other field is kept for the reward
function. With a chat template the prompt is a list of messages, or the text of one, and ``tools`` are its tools.

The order is a keyed shuffle of each epoch, so which prompts a step sees is a function of the step number alone: a
resumed run needs no reader state, and step k of any run with the same seed and file trains the same prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_dta.errors import InputError
from megatron_dta.sampling.chat_template import ChatTemplate
from megatron_dta.sampling.keyed_random import keyed_permutation
from megatron_dta.sampling.tokenizer import Tokenizer

_TEXT_FIELDS = ("prompt", "question")


@dataclass(frozen=True)
class Prompt:
    """One task for the model: its tokens, and the record that the reward function gets."""

    prompt_id: str
    token_ids: np.ndarray  # int32 [T], T >= 1
    record: Mapping[str, Any]  # the row of the file (or the generated problem) as it was given


def load_prompts(
    path: str | Path,
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None = None,
    template: ChatTemplate | None = None,
) -> list[Prompt]:
    """All prompts of a JSONL file, in its order; ``InputError`` names file, row (from 1) and field of a bad one."""
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file}: no such prompt file")
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    with open(file, encoding="utf-8") as lines:
        try:
            for row, line in enumerate(lines, start=1):
                if line.strip():
                    prompt = _parse_row(f"{file}: row {row}", line, row, tokenizer, max_prompt_tokens, template)
                    if prompt.prompt_id in seen:
                        first = seen[prompt.prompt_id]
                        raise InputError(f"{file}: row {row}: id: {prompt.prompt_id!r} was already used in row {first}")
                    seen[prompt.prompt_id] = row
                    prompts.append(prompt)
        except UnicodeDecodeError as error:
            raise InputError(f"{file}: row {len(prompts) + 1} or later: not UTF-8: {error}") from None
    if not prompts:
        raise InputError(f"{file}: no prompts in it")
    return prompts


def prompts_at(prompts: Sequence[Prompt], first: int, count: int, seed: int) -> list[Prompt]:
    """Prompts number ``first`` .. ``first + count - 1`` of an endless stream of keyed shuffles, one an epoch."""
    order: list[Prompt] = []
    while len(order) < count:
        epoch, start = divmod(first + len(order), len(prompts))
        permutation = keyed_permutation(seed, epoch, len(prompts))
        order.extend(prompts[index] for index in permutation[start : start + count - len(order)])
    return order


def _parse_row(
    where: str,
    line: str,
    row: int,
    tokenizer: Tokenizer,
    max_prompt_tokens: int | None,
    template: ChatTemplate | None,
) -> Prompt:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise InputError(f"{where}: must be a JSON object, got {type(record).__name__}")
    given = [name for name in (*_TEXT_FIELDS, "prompt_token_ids") if name in record]
    if len(given) != 1:
        fields = "prompt, question, prompt_token_ids"
        raise InputError(f"{where}: needs exactly one of the fields {fields}, got {', '.join(given) or 'none'}")
    name = given[0]
    token_ids = _parse_ids(where, record[name], tokenizer) if name == "prompt_token_ids" else None
    if token_ids is None:
        if template is None and not isinstance(record[name], str):
            fix = "; messages need --apply-chat-template" if isinstance(record[name], list) else ""
            raise InputError(f"{where}: {name}: must be a string, got {type(record[name]).__name__}{fix}")
        try:
            text = record[name] if template is None else template.text(record[name], record.get("tools"))
            text.encode()
            token_ids = tokenizer.encode(text)
        except InputError as error:
            raise InputError(f"{where}: {name}: {error}") from None
        except UnicodeEncodeError as error:
            raise InputError(f"{where}: {name}: is no valid text: {error}") from None
    if token_ids.size == 0:
        raise InputError(f"{where}: {name}: is empty; a response needs at least one token before it")
    if max_prompt_tokens is not None and token_ids.size > max_prompt_tokens:
        raise InputError(
            f"{where}: {name}: {token_ids.size} tokens, but the model's positions leave {max_prompt_tokens}; "
            "raise --max-position-embeddings or lower --rollout-max-response-len"
        )
    prompt_id = record.get("id", str(row))
    if not isinstance(prompt_id, str | int) or isinstance(prompt_id, bool):
        raise InputError(f"{where}: id: must be a string or an integer, got {type(prompt_id).__name__}")
    return Prompt(str(prompt_id), token_ids, MappingProxyType(record))


def _parse_ids(where: str, ids: Any, tokenizer: Tokenizer) -> np.ndarray:
    if not isinstance(ids, list) or any(not isinstance(token, int) or isinstance(token, bool) for token in ids):
        raise InputError(f"{where}: prompt_token_ids: must be a list of integers")
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise InputError(f"{where}: prompt_token_ids: {token} is outside the vocabulary of {tokenizer.vocab_size}")
    return np.array(ids, dtype=np.int32)
