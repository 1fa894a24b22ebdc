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

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_dta.common.time_limit import TimeLimitError, within_limit
from megatron_dta.core.common.errors import InputError, one_line
from megatron_dta.core.common.files import read_json

ARITHMETIC_ALPHABET = "0123456789+-*= "
# Origin of an end token that no flag and no file names.
GUESSED = "guessed"
_FLAG = "--eos-id"
# End-of-text tokens of common model families, used if no file names one.
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
    ends: dict[int, str]  # every token that ends a response, and what declares it: a flag, a file, or a guess
    eos_id: int  # the first of them, which ends text that is trained
    is_concurrent: bool = False  # whether threads gain time by ``decode_all``

    def encode(self, text: str) -> np.ndarray:
        """Token ids of ``text``, int32 [T]; raises ``InputError`` if the text cannot be represented."""

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids without special tokens and ids beyond ``vocab_size`` (a model's padding)."""

    def decode_all(self, sequences: Iterable[list[int]]) -> list[str]:
        """The text of each sequence."""
        return [self.decode(token_ids) for token_ids in sequences]

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token, which ``decode`` omits; None for a token of ordinary text."""

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that a token stands for, which may be part of a character."""


class CharacterTokenizer(Tokenizer):
    """One token per character of ``ARITHMETIC_ALPHABET``, in its order, then the end of sequence."""

    def __init__(self) -> None:
        self._ids = {character: index for index, character in enumerate(ARITHMETIC_ALPHABET)}
        self.eos_id, self.vocab_size = len(ARITHMETIC_ALPHABET), len(ARITHMETIC_ALPHABET) + 1
        self.ends = {self.eos_id: "CharacterTokenizer's own"}

    def encode(self, text: str) -> np.ndarray:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise InputError(
                f"CharacterTokenizer cannot encode {unknown[0]!r}: it knows only {ARITHMETIC_ALPHABET!r}; "
                "give --tokenizer-type and --tokenizer-model for other text"
            )
        return np.array([self._ids[character] for character in text], dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return "".join(ARITHMETIC_ALPHABET[token] for token in token_ids if token < self.eos_id)

    def special_text(self, token_id: int) -> str | None:
        return "<eos>" if token_id == self.eos_id else None

    def token_bytes(self, token_id: int) -> bytes:
        return (self.special_text(token_id) or self.decode([token_id])).encode()


class NullTokenizer(Tokenizer):
    """For prompts given as token ids; text is the ids separated by blanks, as with Megatron's NullTokenizer."""

    def __init__(self, vocab_size: int, *eos_ids: int) -> None:
        self.vocab_size, self.eos_id = vocab_size, eos_ids[0]
        self.ends = dict.fromkeys(eos_ids, _FLAG)

    def encode(self, text: str) -> np.ndarray:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise InputError(
                f"NullTokenizer cannot encode {text[:40]!r}: give prompt_token_ids, or --tokenizer-type for text"
            ) from None
        return checked_ids(ids, self.vocab_size)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(int(token)) for token in token_ids if token not in self.ends)

    def special_text(self, token_id: int) -> str | None:
        return f"<{token_id}>" if token_id in self.ends else None

    def token_bytes(self, token_id: int) -> bytes:
        return (self.special_text(token_id) or self.decode([token_id])).encode()


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, whose text is encoded whole and always in the same way.

    Args:
        eos_ids: the tokens that end a response; none: those of tokenizer_config.json and of ``declared_ends``, or a
            well-known one.
        folders: further folders for ``declared_ends``, besides that of the file.
    """

    is_concurrent = True

    def __init__(self, path: str | Path, eos_ids: Sequence[int] = (), *folders: str | Path) -> None:
        # Single texts need no further threads, after whose use the library warns in every forked process.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer as FastTokenizer

        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        _require_file(file)
        try:
            self._tokenizer = FastTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"--tokenizer-model {file}: not a tokenizer.json: {one_line(str(error))[:200]}") from None
        # A file may have been saved with settings of its last use, which would clip, pad or vary the text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        # Added tokens may lie beyond the base vocabulary and leave holes, so the largest id counts.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._special = {token: entry.content for token, entry in added.items() if entry.special}
        decoder = self._tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        config = file.with_name("tokenizer_config.json")
        self.ends = _ends(eos_ids, self.vocab_size, self._named_end(config), (file.parent, *folders))
        if not self.ends:
            guesses = map(self._tokenizer.token_to_id, _COMMON_EOS)
            self.ends = {token: GUESSED for token in [t for t in guesses if t is not None][:1]}
        if not self.ends:
            raise InputError(f"--tokenizer-model {file}: no end-of-sequence token found; give its id with --eos-id")
        self.eos_id = next(iter(self.ends))

    def encode(self, text: str) -> np.ndarray:
        # encode_batch lets other threads run, encode does not.
        call = partial(self._tokenizer.encode_batch, [text], add_special_tokens=False)
        try:
            (encoding,) = within_limit(call, f"tokenizer.json cannot encode {text[:40]!r}")
        except TimeLimitError as error:
            raise TimeLimitError(f"{error}; one of its regular expressions may be too slow for this text") from None
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a regular expression that gave up
                raise
            raise InputError(f"tokenizer.json cannot encode {text[:40]!r}: {one_line(str(error))[:200]}") from None
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(token_ids).tolist(), skip_special_tokens=True)

    def decode_all(self, sequences: Iterable[list[int]]) -> list[str]:
        return self._tokenizer.decode_batch(list(sequences), skip_special_tokens=True)

    def special_text(self, token_id: int) -> str | None:
        return self._special.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._added.get(token_id)
        if piece is not None:
            return piece.encode()
        piece = self._tokenizer.id_to_token(token_id) or ""
        if self._is_byte_level:
            return b"".join(_BYTES_OF_CHARACTERS.get(character, character.encode()) for character in piece)
        return _bytes_of_piece(piece)

    def _named_end(self, config: Path) -> dict[int, str]:
        """The end of sequence that tokenizer_config.json names."""
        eos = _json_object(config).get("eos_token")
        name = eos.get("content") if isinstance(eos, dict) else eos
        token = self._tokenizer.token_to_id(name) if isinstance(name, str) else None
        return {} if token is None else {token: config.name}


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model.

    Args:
        eos_ids: the tokens that end a response; none: that of the model and those of ``declared_ends``.
        folders: further folders for ``declared_ends``, besides that of the file.
    """

    def __init__(self, path: str | Path, eos_ids: Sequence[int] = (), *folders: str | Path) -> None:
        from sentencepiece import SentencePieceProcessor

        _require_file(Path(path))
        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except Exception as error:  # RuntimeError or OSError, by version
            raise InputError(
                f"--tokenizer-model {path}: not a SentencePiece model: {one_line(str(error))[:200]}"
            ) from None
        self.vocab_size = self._processor.vocab_size()
        piece = self._processor.eos_id()
        named = {} if piece < 0 else {piece: "the SentencePiece model"}
        self.ends = _ends(eos_ids, self.vocab_size, named, (Path(path).parent, *folders))
        if not self.ends:
            raise InputError(f"--tokenizer-model {path}: it has no end-of-sequence piece; give an id with --eos-id")
        self.eos_id = next(iter(self.ends))

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._processor.encode(text), dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        known = [int(token) for token in token_ids if token not in self.ends and token < self.vocab_size]
        return self._processor.decode(known)

    def special_text(self, token_id: int) -> str | None:
        if token_id >= self.vocab_size:
            return None
        special = token_id in self.ends or self._processor.is_control(token_id)
        return self._processor.id_to_piece(token_id) if special else None

    def token_bytes(self, token_id: int) -> bytes:
        return _bytes_of_piece(self._processor.id_to_piece(token_id)) if token_id < self.vocab_size else b""


def _bytes_of_piece(piece: str) -> bytes:
    """The bytes of a piece in SentencePiece's form: a blank is U+2581, and a byte that no other piece has is <0xF0>."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", piece)
    return piece.replace("\u2581", " ").encode() if byte is None else bytes.fromhex(byte[1])


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
    eos_ids: Sequence[int] | None = None,
    vocab_size: int | None = None,
    checkpoint: str | None = None,
) -> Tokenizer:
    """The tokenizer of the flags; ``InputError`` names a missing or wrong flag.

    A response ends with one of ``eos_ids`` or, by default, with a token that a file beside the tokenizer or in
    ``checkpoint`` declares.

    ``vocab_size`` is the model's ``--vocab-size`` if it is known: the tokenizer's ids must be below it, and
    NullTokenizer, which has no vocabulary of its own, uses it. ``checkpoint`` is the source of the model's weights.
    """
    if tokenizer_type == "CharacterTokenizer":
        if tokenizer_model is not None:
            raise InputError(
                "--tokenizer-model is not used by CharacterTokenizer; leave it out or set --tokenizer-type"
            )
        if eos_ids:
            raise InputError("--eos-id is not used by CharacterTokenizer, which has its own; leave it out")
        tokenizer: Tokenizer = CharacterTokenizer()
    elif tokenizer_type == "NullTokenizer":
        if tokenizer_model is not None:
            raise InputError("--tokenizer-model is not used by NullTokenizer; leave it out or set --tokenizer-type")
        if vocab_size is None or not eos_ids:
            raise InputError("NullTokenizer needs --vocab-size and --eos-id")
        tokenizer = NullTokenizer(vocab_size, *_ends(eos_ids, vocab_size))
    else:
        if tokenizer_model is None:
            raise InputError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE")
        reader = HuggingFaceTokenizer if tokenizer_type == "HuggingFaceTokenizer" else SentencePieceTokenizer
        tokenizer = reader(tokenizer_model, eos_ids or (), *([] if checkpoint is None else [checkpoint]))
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


def checked_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """``ids`` as int32 [T]; ``InputError`` names the first one outside of the vocabulary."""
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InputError(f"{str(outside)[:40]} is outside the vocabulary of {vocab_size} tokens")
    return np.array(ids, dtype=np.int32)


def declared_ends(folder: str | Path) -> dict[int, str]:
    """The end tokens that the model in ``folder`` declares for generation, and the file: generation_config.json or,
    without one, config.json."""
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        content = _json_object(file)
        for part in (content, content.get("text_config")):
            ends = part.get("eos_token_id") if isinstance(part, dict) else None
            ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
            if any(not isinstance(token, int) or isinstance(token, bool) for token in ends):
                raise InputError(f"{file}: eos_token_id: must be a token id or a list of them")
            if ends:
                return dict.fromkeys(ends, name)
    return {}


def _ends(
    eos_ids: Sequence[int], vocab_size: int, named: Mapping[int, str] | None = None, folders: Sequence[str | Path] = ()
) -> dict[int, str]:
    """``Tokenizer.ends``: ``eos_ids`` if there are any, else what ``named`` and ``folders`` declare."""
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"--eos-id {token} is outside the vocabulary of {vocab_size} tokens")
    if eos_ids:
        return dict.fromkeys(eos_ids, _FLAG)
    ends = dict(named or {})
    for folder in folders:
        for token, file in declared_ends(folder).items():
            if 0 <= token < vocab_size:  # what the tokenizer lacks is never sampled
                ends.setdefault(token, file)
    return ends


def _byte_characters() -> dict[str, bytes]:
    """The bytes that the characters of a byte-level vocabulary stand for: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    named = [(chr(byte), byte) for byte in printable] + [(chr(256 + i), byte) for i, byte in enumerate(others)]
    return {character: bytes([byte]) for character, byte in named}


_BYTES_OF_CHARACTERS = _byte_characters()


def _json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file."""
    if not file.is_file():
        return {}
    content = read_json(file)
    if not isinstance(content, dict):
        raise InputError(f"{file}: not a JSON object")
    return content


def _require_file(file: Path) -> None:
    if not file.is_file():
        raise InputError(f"--tokenizer-model {file}: no such file")
