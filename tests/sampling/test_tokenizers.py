"""Tokenizers and prompt files of all forms: round trips, ends of sequence, order of prompts, one line for bad input."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import tokenizers_cases
from chat_folder import make_chat_folder
from megatron_dta.common import time_limit
from megatron_dta.common.rows import field_names, read_rows
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling.prompts.load import Prompt, PromptReader, prompts_at
from megatron_dta.sampling.prompts.text_rollouts import holds_text
from megatron_dta.sampling.prompts.tokenizer import (
    ARITHMETIC_ALPHABET,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    NullTokenizer,
    build_tokenizer,
)
from tokenizers_cases import TEXT

# The fixture, under the name that tests use.
tokenizer_json = tokenizers_cases.tokenizer_json


@pytest.fixture
def sentencepiece_model(tmp_path: Path) -> Path:
    import sentencepiece

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(TEXT * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "sp"), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return tmp_path / "sp.model"


def test_character_tokenizer():
    tokenizer = build_tokenizer("CharacterTokenizer")
    ids = tokenizer.encode("12+7=")
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 10, 7, ARITHMETIC_ALPHABET.index("=")]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "12+7="
    assert tokenizer.eos_id == tokenizer.vocab_size - 1 == len(ARITHMETIC_ALPHABET)
    with pytest.raises(InputError, match=r"cannot encode 'x'.*--tokenizer-type"):
        tokenizer.encode("1x")


def test_hugging_face_tokenizer(tokenizer_json: Path):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json))
    for text in (*TEXT, "naïve ☃ \n\ttext", ""):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id == 0
    assert tokenizer.decode([*tokenizer.encode("fox"), 0, tokenizer.vocab_size]) == "fox"
    whole_range = json.loads(tokenizer_json.read_text())
    last = max([*whole_range["model"]["vocab"].values(), *(token["id"] for token in whole_range["added_tokens"])])
    assert tokenizer.vocab_size == last + 1
    # The directory works like the file; tokenizer_config.json and --eos-id take precedence, in that order.
    config = tokenizer_json.with_name("tokenizer_config.json")
    config.write_text(json.dumps({"eos_token": {"content": "<extra>"}}))
    assert build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json.parent)).eos_id == last
    assert build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json), eos_ids=[7]).eos_id == 7
    config.write_text("[")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: is not a JSON file"):
        build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json))


def test_every_declared_end_ends_a_response(tokenizer_json: Path, tmp_path: Path):
    """A flag alone, or the tokenizer's end and then those of generation_config.json or, without it, of config.json."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 9}}))

    def ends(*eos_ids: int) -> dict[int, str]:
        built = build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json), eos_ids, checkpoint=str(model))
        assert built.eos_id == next(iter(built.ends))
        return built.ends

    assert ends() == {9: "config.json"}  # rather than a guess
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8, 10**6]}))
    assert ends() == dict.fromkeys((7, 8), "generation_config.json")
    tokenizer_json.with_name("tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert ends() == {0: "tokenizer_config.json"} | dict.fromkeys((7, 8), "generation_config.json")
    tokenizer_json.with_name("generation_config.json").write_text('{"eos_token_id": 5}')
    assert list(ends()) == [0, 5, 7, 8]
    assert ends(3, 4) == dict.fromkeys((3, 4), "--eos-id")
    for wrong in ('"</s>"', "[1, true]", "[1.5]"):
        (model / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(InputError, match=r"model/generation_config\.json: eos_token_id: must be a token id or a"):
            ends()


def test_what_a_tokenizer_file_was_last_used_with_does_not_change_texts(tokenizer_json: Path):
    plain = build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json)).encode(TEXT[0])
    content = json.loads(tokenizer_json.read_text())
    clip = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    pad |= {"pad_type_id": 0, "pad_token": "!"}
    content["model"]["dropout"] = 0.9
    tokenizer_json.write_text(json.dumps(content | {"truncation": clip, "padding": pad}))
    for _ in range(9):
        assert build_tokenizer("HuggingFaceTokenizer", str(tokenizer_json)).encode(TEXT[0]).tolist() == plain.tolist()


def test_bytes_of_tokens(tmp_path: Path):
    """With a byte-level vocabulary and with bytes as pieces: of an emoji no token is a character."""
    pieces = ["\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256)), "</s>"]
    fallback = tokenizers.Tokenizer(
        tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    fallback.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    fallback.add_special_tokens(["</s>"])
    fallback.save(str(tmp_path / "tokenizer.json"))
    emoji = [2 + byte for byte in "🙂".encode()]
    for file, token_ids in ((tmp_path, [0, *emoji, 1, len(pieces) - 1]), (make_chat_folder(tmp_path / "chat"), None)):
        tokenizer = HuggingFaceTokenizer(file)
        token_ids = tokenizer.encode(" a🙂b") if token_ids is None else token_ids
        pieces_of_text = [tokenizer.token_bytes(int(token)) for token in token_ids]
        assert b"".join(pieces_of_text) == (" a🙂b" + "</s>" * (file == tmp_path)).encode()
        assert b"\x9f" in pieces_of_text
        assert tokenizer.token_bytes(tokenizer.vocab_size + 3) == b""


def test_sentencepiece_tokenizer(sentencepiece_model: Path):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(sentencepiece_model))
    for text in TEXT:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
        assert b"".join(tokenizer.token_bytes(int(token)) for token in ids).decode() == " " + text
    assert tokenizer.eos_id == 2
    assert 2 < tokenizer.vocab_size <= 60
    assert build_tokenizer("SentencePieceTokenizer", str(sentencepiece_model), eos_ids=[5]).eos_id == 5
    # A model's vocabulary may be larger than its tokenizer's.
    assert tokenizer.decode([*tokenizer.encode("lazy dog"), tokenizer.vocab_size]) == "lazy dog"


def test_null_tokenizer():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100, eos_ids=[99])
    assert isinstance(tokenizer, NullTokenizer)
    assert tokenizer.decode([3, 14, 99]) == "3 14"
    assert tokenizer.encode("3 14").tolist() == [3, 14]
    with pytest.raises(InputError, match="prompt_token_ids"):
        tokenizer.encode("three")
    for text in ("3 100", "-1", "3 7000000000000000000007"):
        with pytest.raises(InputError, match=rf"{text.split()[-1]} is outside the vocabulary of 100 tokens"):
            tokenizer.encode(text)


def test_bad_tokenizer_flags(tmp_path: Path, tokenizer_json: Path, sentencepiece_model: Path):
    cases = [
        (dict(tokenizer_type="HuggingFaceTokenizer"), r"needs --tokenizer-model"),
        (dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "none.json")), "no such file"),
        (dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(sentencepiece_model)), r"not a tokenizer"),
        (dict(tokenizer_type="CharacterTokenizer", tokenizer_model="x"), r"--tokenizer-model is not used"),
        (dict(tokenizer_type="CharacterTokenizer", vocab_size=3), r"--vocab-size 3 is smaller than the tokenizer's 16"),
        (
            # Not "raise --vocab-size": the checkpoint decides it.
            dict(tokenizer_type="CharacterTokenizer", vocab_size=3, checkpoint="runs/a"),
            "has 16 ids, more than the vocabulary of 3 of the model in runs/a: it is another model's tokenizer",
        ),
        (dict(tokenizer_type="NullTokenizer", vocab_size=9, eos_ids=[9]), r"--eos-id 9 is outside"),
        (
            dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tokenizer_json), eos_ids=[9**9]),
            "is outside",
        ),
    ]
    for arguments, message in cases:
        with pytest.raises(InputError, match=message) as caught:
            build_tokenizer(**arguments)
        assert "\n" not in str(caught.value)


def test_no_end_of_sequence_found(tmp_path: Path):
    from tokenizers import Tokenizer, models

    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")).save(str(file))
    with pytest.raises(InputError, match="--eos-id"):
        build_tokenizer("HuggingFaceTokenizer", str(file))
    assert build_tokenizer("HuggingFaceTokenizer", str(file), eos_ids=[1]).eos_id == 1


def test_prompt_file(tmp_path: Path):
    tokenizer = CharacterTokenizer()
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"question": "1+1=", "answer": 2, "id": "a"},
        {"prompt": "2+2=", "answer": "4", "source": {"file": 3}},
        {"prompt_token_ids": [3, 10, 3, 13], "id": 7},
    ]
    file.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    prompts = PromptReader(tokenizer, 4).read(file)
    assert [prompt.prompt_id for prompt in prompts] == ["a", "3", "7"]  # rows are counted as lines of the file
    assert [tokenizer.decode(prompt.token_ids) for prompt in prompts] == ["1+1=", "2+2=", "3+3="]
    assert [dict(prompt.record) for prompt in prompts] == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "1+', "row 2: not valid JSON"),
        ('{"answer": 3}', "row 2: needs exactly one of the fields .*got none"),
        ('{"question": "1\\ud800"}', "row 2: question: is not valid text"),
        ('{"question": [{"role": "user"}]}', "row 2: question: .* messages need --apply-chat-template"),
        ('{"question": "1?"}', "row 2: question: CharacterTokenizer cannot encode"),
        ('{"question": "123456789"}', "row 2: question: 9 tokens, but .*--max-position-embeddings"),
        ('{"question": "1", "id": "first"}', "row 2: id: 'first' was already used in row 1"),
        ('{"prompt_token_ids": [1, true]}', "row 2: prompt_token_ids: must be a list of integers"),
        ('{"prompt_token_ids": [-1]}', "row 2: prompt_token_ids: -1 is outside"),
    ],
)
def test_bad_prompt_rows(tmp_path: Path, line: str, message: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "1+1=", "id": "first"}\n' + line + "\n")
    with pytest.raises(InputError, match=message) as caught:
        PromptReader(CharacterTokenizer(), 8).read(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_prompt_files(tmp_path: Path):
    with pytest.raises(InputError, match="no such prompt file"):
        PromptReader(CharacterTokenizer()).read(tmp_path / "none.jsonl")
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n \n")
    with pytest.raises(InputError, match="no prompts"):
        PromptReader(CharacterTokenizer()).read(file)
    file.write_bytes(b'{"question": "1"}\n{"question": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        PromptReader(CharacterTokenizer()).read(file)


def test_the_order_of_prompts_is_a_function_of_the_place():
    prompts = [Prompt(str(i), np.array([i], dtype=np.int32), {}) for i in range(7)]
    stream = [prompt.prompt_id for prompt in prompts_at(prompts, 0, 70, seed=3)]
    for epoch in range(10):
        assert sorted(stream[7 * epoch : 7 * epoch + 7]) == sorted(prompt.prompt_id for prompt in prompts)
    assert len({tuple(stream[7 * epoch : 7 * epoch + 7]) for epoch in range(10)}) > 5
    for first, count in ((0, 1), (5, 4), (6, 16), (13, 2), (69, 1)):
        assert [prompt.prompt_id for prompt in prompts_at(prompts, first, count, seed=3)] == stream[
            first : first + count
        ]
    assert [prompt.prompt_id for prompt in prompts_at(prompts, 0, 70, seed=4)] != stream


def test_a_slow_regular_expression_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the pieces takes long, and the longest one is more than the library tries."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    slow = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    slow.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    slow.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path), eos_ids=[1])
    assert tokenizer.encode("ab").tolist() == [0, 1]
    with pytest.raises(InputError, match=r"tokenizer.json cannot encode 'a+': .*retry"):
        tokenizer.encode("a" * 40 + "b")
    monkeypatch.setattr(time_limit, "SECONDS", 0.1)
    with pytest.raises(InputError, match=r"cannot encode .*: no result after 0 s; one of its regular expressions"):
        tokenizer.encode(("a" * 20 + "b") * 12)


ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "ä", "response": None}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
BOM = b"\xef\xbb\xbf"


def zipped(content: bytes) -> bytes:
    """Gzipped without a time, so that all test workers have the same names of tests."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl", BOM + LINES.replace(b"\n", b"\r\n")),
        ("gzipped.jsonl", zipped(BOM + LINES)),
        ("rows.json", BOM + b"\n" + json.dumps(ROWS, indent=1, ensure_ascii=False).encode()),
        ("rows.json.gz", zipped(json.dumps(ROWS, indent=1).encode())),
    ],
)
def test_rows_are_the_same_in_all_forms(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert [row for _, row in read_rows(path)] == ROWS
    assert field_names(path) == {"prompt", "answer"}
    assert holds_text(path)


@pytest.mark.parametrize("content", [b"\xff\xfe{", b"PAR1", b"(\xb5/\xfd\0", b"PK\x03\x04", zipped(LINES)[:-9]])
def test_other_content_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"UTF-16|\.parquet|zstd|zip archive|damaged or cut short") as caught:
        list(read_rows(path))
    assert str(caught.value).startswith(f"{path}: ")


def test_rollouts_may_be_gzipped(tmp_path: Path) -> None:
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "reward": 1.0, "group_id": "a"}
    path = tmp_path / "rollouts.jsonl.gz"
    path.write_bytes(zipped(BOM + json.dumps(row).encode()))
    (rollout,) = load_rollouts(path)
    assert rollout.token_ids.tolist() == [1, 2, 3]
