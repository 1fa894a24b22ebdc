"""Converts text to token ids and back, for prompts and rewards. Training uses the tokens as they were sampled.

``--tokenizer-type`` chooses the tokenizer (Megatron's names, and ``CharacterTokenizer``), read from
``--tokenizer-model``:

    CharacterTokenizer       one token per character of the arithmetic task; needs no file
    HuggingFaceTokenizer     a ``tokenizer.json`` or its directory, through the ``tokenizers`` library
    SentencePieceTokenizer   a SentencePiece ``.model``
    NullTokenizer            no text: prompts have ``prompt_token_ids``, and "text" is the ids separated by blanks

Text is encoded unchanged: no BOS is added and no chat template is applied. Write them into the prompt, give
``prompt_token_ids``, or use ``--apply-chat-template``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_dta.common.errors import InputError, one_line
from megatron_dta.common.time_limit import within_limit

TOKENIZER_TYPES = ("CharacterTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer")
ARITHMETIC_ALPHABET = "0123456789+-*= "
# Origin of an end-of-sequence token that is not named in a file.
GUESSED = "guessed"
# End-of-text tokens of common model families, used if tokenizer_config.json does not name one.
_COMMON_EOS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<end_of_turn>",
    "[EOS]",
)


class Tokenizer(Protocol):
    vocab_size: int  # ids are in [0, vocab_size)
    eos_id: int  # the token that ends a response
    eos_origin: str  # where it comes from: a flag, a file, or a guess

    def encode(self, text: str) -> np.ndarray:
        """Token ids of ``text``, int32 [T]; raises ``InputError`` if the text cannot be represented."""

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids without special tokens and ids beyond ``vocab_size`` (a model's padding)."""

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token, which ``decode`` omits; None for a token of ordinary text."""


class CharacterTokenizer:
    """One token per character: ids 0 .. len(alphabet) - 1 in the order of the alphabet, then the end of sequence."""

    def __init__(self, alphabet: str = ARITHMETIC_ALPHABET) -> None:
        if len(set(alphabet)) != len(alphabet):
            raise ValueError("alphabet has a character twice")
        self._alphabet = alphabet
        self._ids = {character: index for index, character in enumerate(alphabet)}
        self.eos_id, self.eos_origin = len(alphabet), "CharacterTokenizer's own"
        self.vocab_size = len(alphabet) + 1

    def encode(self, text: str) -> np.ndarray:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise InputError(
                f"CharacterTokenizer cannot encode {unknown[0]!r}: it knows only {self._alphabet!r}; "
                "give --tokenizer-type and --tokenizer-model for other text"
            )
        return np.array([self._ids[character] for character in text], dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return "".join(self._alphabet[token] for token in token_ids if token < len(self._alphabet))

    def special_text(self, token_id: int) -> str | None:
        return "<eos>" if token_id == self.eos_id else None


class NullTokenizer:
    """For prompts given as token ids; text is the ids separated by blanks, as with Megatron's NullTokenizer."""

    def __init__(self, vocab_size: int, eos_id: int) -> None:
        self.vocab_size = vocab_size
        self.eos_id, self.eos_origin = eos_id, "--eos-id"

    def encode(self, text: str) -> np.ndarray:
        try:
            return np.array([int(word) for word in text.split()], dtype=np.int32)
        except ValueError:
            raise InputError(
                f"NullTokenizer cannot encode {text[:40]!r}: give prompt_token_ids, or --tokenizer-type for text"
            ) from None

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(token)) for token in token_ids if token != self.eos_id)

    def special_text(self, token_id: int) -> str | None:
        return f"<{token_id}>" if token_id == self.eos_id else None


class HuggingFaceTokenizer:
    """A ``tokenizer.json``; the end of sequence is ``eos_id``, that of tokenizer_config.json, or a well-known token."""

    def __init__(self, path: str | Path, eos_id: int | None = None) -> None:
        # Single texts need no further threads, after whose use the library warns in every forked process.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        _require_file(file)
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"--tokenizer-model {file}: not a tokenizer.json: {one_line(str(error))[:200]}") from None
        # Added tokens may lie beyond the base vocabulary and leave holes, so the largest id counts.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token: found.content for token, found in added.items() if found.special}
        if eos_id is not None:
            self.eos_id, self.eos_origin = _checked_eos(eos_id, self.vocab_size), "--eos-id"
        else:
            self.eos_id, self.eos_origin = self._find_eos(file)

    def encode(self, text: str) -> np.ndarray:
        # encode_batch lets other threads run, encode does not.
        call = partial(self._tokenizer.encode_batch, [text], add_special_tokens=False)
        try:
            (encoding,) = within_limit(call, f"tokenizer.json cannot encode {text[:40]!r}")
        except InputError as error:
            raise InputError(f"{error}; one of its regular expressions may be too slow for this text") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a regular expression that gave up
                raise
            raise InputError(f"tokenizer.json cannot encode {text[:40]!r}: {one_line(str(error))[:200]}") from None
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True)

    def special_text(self, token_id: int) -> str | None:
        return self._special.get(token_id)

    def _find_eos(self, file: Path) -> tuple[int, str]:
        config = file.with_name("tokenizer_config.json")
        if config.exists():
            try:
                eos = json.loads(config.read_text()).get("eos_token")
            except (ValueError, AttributeError) as error:
                raise InputError(f"{config}: not a JSON object: {one_line(str(error))[:200]}") from None
            name = eos.get("content") if isinstance(eos, dict) else eos
            token = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
            if token is not None:
                return token, "tokenizer_config.json"
        for name in _COMMON_EOS:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token, GUESSED
        raise InputError(f"--tokenizer-model {file}: no end-of-sequence token found; give its id with --eos-id")


class SentencePieceTokenizer:
    """A SentencePiece model; the end of sequence is ``eos_id`` or that of the model."""

    def __init__(self, path: str | Path, eos_id: int | None = None) -> None:
        from sentencepiece import SentencePieceProcessor

        _require_file(Path(path))
        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # RuntimeError or OSError, by version
            raise InputError(
                f"--tokenizer-model {path}: not a SentencePiece model: {one_line(str(error))[:200]}"
            ) from None
        self.vocab_size = self._processor.vocab_size()
        found = self._processor.eos_id() if eos_id is None else _checked_eos(eos_id, self.vocab_size)
        if found < 0:
            raise InputError(f"--tokenizer-model {path}: it has no end-of-sequence piece; give an id with --eos-id")
        self.eos_id, self.eos_origin = found, "the SentencePiece model" if eos_id is None else "--eos-id"

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        known = [int(token) for token in token_ids if token != self.eos_id and token < self.vocab_size]
        return self._processor.decode(known)

    def special_text(self, token_id: int) -> str | None:
        if token_id >= self.vocab_size:
            return None
        special = token_id == self.eos_id or self._processor.is_control(token_id)
        return self._processor.id_to_piece(token_id) if special else None


def encode_field(tokenizer: Tokenizer, name: str, value: Any) -> np.ndarray:
    """Token ids of the text in field ``name`` of a row, int32 [T]; ``InputError`` names the field."""
    if not isinstance(value, str):
        fix = "; messages need --apply-chat-template" if isinstance(value, list) else ""
        raise InputError(f"{name}: must be a string, got {type(value).__name__}{fix}")
    try:
        value.encode()
        return tokenizer.encode(value)
    except UnicodeEncodeError as error:
        raise InputError(f"{name}: is not valid text: {error}") from None
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    checkpoint: str | None = None,
) -> Tokenizer:
    """The tokenizer of the flags; ``InputError`` names a missing or wrong flag.

    ``vocab_size`` is the model's ``--vocab-size`` if it is known: the tokenizer's ids must be below it, and
    NullTokenizer, which has no vocabulary of its own, uses it. ``checkpoint`` is the source of the model's weights.
    """
    if tokenizer_type == "CharacterTokenizer":
        if tokenizer_model is not None:
            raise InputError(
                "--tokenizer-model is not used by CharacterTokenizer; leave it out or set --tokenizer-type"
            )
        if eos_id is not None:
            raise InputError("--eos-id is not used by CharacterTokenizer, which has its own; leave it out")
        tokenizer: Tokenizer = CharacterTokenizer()
    elif tokenizer_type == "NullTokenizer":
        if tokenizer_model is not None:
            raise InputError("--tokenizer-model is not used by NullTokenizer; leave it out or set --tokenizer-type")
        if vocab_size is None or eos_id is None:
            raise InputError("NullTokenizer needs --vocab-size and --eos-id")
        tokenizer = NullTokenizer(vocab_size, _checked_eos(eos_id, vocab_size))
    elif tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer"):
        if tokenizer_model is None:
            raise InputError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE")
        reader = HuggingFaceTokenizer if tokenizer_type == "HuggingFaceTokenizer" else SentencePieceTokenizer
        tokenizer = reader(tokenizer_model, eos_id)
    else:
        raise InputError(f"--tokenizer-type {tokenizer_type} is unknown; choose one of {', '.join(TOKENIZER_TYPES)}")
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        if checkpoint is not None:
            raise InputError(
                f"--tokenizer-model {tokenizer_model}: has {tokenizer.vocab_size} ids, more than the vocabulary of "
                f"{vocab_size} of the model in {checkpoint}: it is another model's tokenizer; give the one that the "
                "model was trained with"
            )
        raise InputError(
            f"--vocab-size {vocab_size} is smaller than the tokenizer's {tokenizer.vocab_size} ids; raise it to that"
        )
    return tokenizer


def _checked_eos(eos_id: int, vocab_size: int) -> int:
    if not 0 <= eos_id < vocab_size:
        raise InputError(f"--eos-id {eos_id} is outside the vocabulary of {vocab_size} tokens")
    return eos_id


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"--tokenizer-model {file}: no such file")
