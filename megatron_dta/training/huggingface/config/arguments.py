"""Derives settings from a Hugging Face checkpoint on the command line: the model and, for prompts, the tokenizer.

The functions see only the flags that the user gave, so they can distinguish a contradicting flag from a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config.model import ModelConfig
from megatron_dta.training.huggingface.config.config import settings_from_hf

# Tokenizer types and their files; the first file that the folder contains is used.
_TOKENIZERS = {"HuggingFaceTokenizer": "tokenizer.json", "SentencePieceTokenizer": "tokenizer.model"}


def add_hf_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add the settings that follow from ``hf_checkpoint`` or ``load_hf`` to ``given``, if it has one of them.

    Args:
        given: values of the flags that the user gave, by field name.

    Raises:
        InputError: the checkpoint cannot be used, or a flag contradicts it.
    """
    named, loaded = given.get("hf_checkpoint"), given.get("load_hf")
    folder = named or loaded
    if folder is None:
        return dict(given)
    if named is not None and loaded is not None and Path(named).resolve() != Path(loaded).resolve():
        raise InputError(f"--hf-checkpoint {named} contradicts --load-hf {loaded}; leave --hf-checkpoint out")
    names = {setting.name for setting in fields(ModelConfig)}
    settings = settings_from_hf(folder, {name: value for name, value in given.items() if name in names})
    return {**_tokenizer(given, Path(folder)), **given, **settings, "hf_checkpoint": folder}


def _tokenizer(given: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Type and file of the tokenizer, if prompts or text need one and the user gave none."""
    if (given.get("prompt_data") or given.get("rollouts")) is None or given.get("tokenizer_model") is not None:
        return {}
    for tokenizer_type, name in _TOKENIZERS.items():
        if given.get("tokenizer_type", tokenizer_type) == tokenizer_type and (folder / name).is_file():
            return {"tokenizer_type": tokenizer_type, "tokenizer_model": str(folder / name)}
    return {}
