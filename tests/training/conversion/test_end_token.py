"""An exported folder names the end token that was trained, in all its files and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dta.core.common.errors import InputError
from megatron_dta.training.huggingface.config.end_token import name_end_token

ADDED = {"added_tokens": [{"id": 6, "content": "<s>"}, {"id": 7, "content": "<|im_end|>"}]}


def write(folder: Path, **files: Any) -> None:
    for name, content in ({"tokenizer": ADDED} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


def test_another_token_takes_the_place(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": 6, "hidden_size": 8},
        generation_config={"eos_token_id": 6, "temperature": 0.5},
        tokenizer_config={"eos_token": {"content": "<s>", "lstrip": False}, "chat_template": "é"},
        special_tokens_map={"eos_token": "<s>"},
    )
    name_end_token(tmp_path, 7)
    assert read(tmp_path, "config") == {"eos_token_id": 7, "hidden_size": 8}
    # generate() also stops at what it stopped at before.
    assert read(tmp_path, "generation_config") == {"eos_token_id": [7, 6], "temperature": 0.5}
    assert read(tmp_path, "tokenizer_config")["eos_token"] == {"content": "<|im_end|>", "lstrip": False}
    assert "é" in (tmp_path / "tokenizer_config.json").read_text(encoding="utf-8")
    assert read(tmp_path, "special_tokens_map") == {"eos_token": "<|im_end|>"}


def test_files_that_name_it_keep_every_byte(tmp_path: Path) -> None:
    files = {
        "config": {"eos_token_id": [6, 7]},
        "generation_config": {"eos_token_id": [6, 7]},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
    }
    write(tmp_path, **files)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    name_end_token(tmp_path, 7)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"text_config": {}}, {"text_config": {"eos_token_id": 7}}),
        (
            {"eos_token_id": [6], "text_config": {"eos_token_id": 6}},
            {"eos_token_id": 7, "text_config": {"eos_token_id": 7}},
        ),
        ({}, {"eos_token_id": 7}),
    ],
)
def test_configurations(config: dict, expected: dict, tmp_path: Path) -> None:
    write(tmp_path, config=config)
    name_end_token(tmp_path, 7)
    assert read(tmp_path, "config") == expected
    assert not (tmp_path / "generation_config.json").exists()


def test_a_token_without_text_leaves_the_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, config={}, tokenizer_config={"eos_token": "<s>"})
    name_end_token(tmp_path, 3)
    assert read(tmp_path, "tokenizer_config") == {"eos_token": "<s>"}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"generation_config\.json: must hold a JSON object and holds a list"):
        name_end_token(tmp_path, 3)
