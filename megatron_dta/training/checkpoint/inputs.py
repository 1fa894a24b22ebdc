"""Digests of the files that a run reads, so that a continued run can say which of them were edited.

Covered are prompts and rollouts, the files of the tokenizer with its chat template and end tokens, and the user's
Python files. What these import is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_dta.core.config.options import flag_of
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.train import settings_of

_DATA = {"prompt_data", "eval_prompt_data", "rollouts", "eval_rollouts"}
_CODE = {"reward_function", "environment", "agent_callable"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


def input_digests(config: TrainConfig) -> dict[str, str]:
    """Flag and file -> digest of the file's content, of all files that exist."""
    digests = {}
    for flag, file in _files(config):
        if file.is_file():
            with open(file, "rb") as content:
                digests[f"{flag} {file}"] = hashlib.file_digest(content, "sha256").hexdigest()
    return digests


def changed_inputs(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for every file with other content than ``before``. Other names are changes of flags, which say so."""
    return [f"{name}: its content was edited" for name in now if before.get(name, now[name]) != now[name]]


def _files(config: TrainConfig) -> Iterator[tuple[str, Path]]:
    for _, setting, value in settings_of(config):
        flag = flag_of(setting)
        if setting.name in _DATA:
            yield from ((flag, Path(file)) for file in value or ())
        elif setting.name in _CODE and value:
            yield flag, Path(value.rpartition(":")[0])
        elif setting.name == "tokenizer_model" and value:
            folder = Path(value) if Path(value).is_dir() else Path(value).parent
            names = dict.fromkeys((Path(value).name, *_TOKENIZER_FILES))
            yield from ((flag, folder / name) for name in names)
        elif setting.name == "load_hf" and value:
            yield flag, Path(value) / "generation_config.json"
