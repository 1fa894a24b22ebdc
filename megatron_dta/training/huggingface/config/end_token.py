"""Makes an exported folder name the token that ends a response in all its files.

``generate`` and inference servers stop at the tokens of generation_config.json (or, without one, of config.json), and
chat templates and trainers take the one of tokenizer_config.json. A base model's files often name another token than
the one that the model was trained to end with. Files that name it already are left as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_dta.training.huggingface.config.values import CONFIG_FILE, read_object

_KEY, _TEXT_KEY = "eos_token_id", "eos_token"


def name_end_token(folder: Path, end_id: int) -> None:
    """Let the files in ``folder`` name ``end_id``; end tokens that generation_config.json lists remain.

    Raises:
        InputError: a file is no JSON object.
    """
    config = read_object(folder / CONFIG_FILE)
    holders = [config, config["text_config"]] if isinstance(config.get("text_config"), dict) else [config]
    # A model around the text model may leave the token to it.
    holders = [holder for holder in holders if _KEY in holder] or holders[-1:]
    if any([_add_id(holder, end_id, keep=False) for holder in holders]):
        _write(folder / CONFIG_FILE, config)
    path = folder / "generation_config.json"
    if path.is_file():
        generation = read_object(path)
        if _add_id(generation, end_id, keep=True):
            _write(path, generation)
    text = _text_of(folder / "tokenizer.json", end_id)
    for name in ("tokenizer_config.json", "special_tokens_map.json") if text is not None else ():
        path = folder / name
        if path.is_file():
            _name_text(path, text)


def _add_id(holder: dict[str, Any], end_id: int, keep: bool) -> bool:
    """Put ``end_id`` first, before the other ones or in their place; returns whether it was not there."""
    named = holder.get(_KEY)
    listed = named if isinstance(named, list) else [] if named is None else [named]
    if end_id in listed:
        return False
    holder[_KEY] = [end_id, *listed] if keep and listed else end_id
    return True


def _name_text(path: Path, text: str) -> None:
    content = read_object(path)
    named = content.get(_TEXT_KEY)
    if (named.get("content") if isinstance(named, dict) else named) == text:
        return
    content[_TEXT_KEY] = {**named, "content": text} if isinstance(named, dict) else text
    _write(path, content)


def _text_of(path: Path, token_id: int) -> str | None:
    """The text of an added token; None if tokenizer.json is absent or does not add it."""
    if not path.is_file():
        return None
    added = read_object(path).get("added_tokens") or ()
    return next((token["content"] for token in added if token.get("id") == token_id), None)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
