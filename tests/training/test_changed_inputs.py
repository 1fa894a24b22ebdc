"""A continued run says which of the files that it reads were edited."""

from __future__ import annotations

from pathlib import Path

from chat_folder import make_chat_folder
from megatron_dta.training.arguments import parse_arguments
from megatron_dta.training.checkpoint.inputs import changed_inputs, input_digests


def test_every_edited_file_is_named(tmp_path: Path) -> None:
    folder = make_chat_folder(tmp_path / "model", config_name="chat_template.jinja")
    files = [tmp_path / name for name in ("p.jsonl", "e.jsonl", "r.py")]
    files += [folder / name for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")]
    files.append(folder / "generation_config.json")
    for file in files:
        file.write_text("0") if not file.exists() else None
    arguments = (
        "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 64 --apply-chat-template "
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --prompt-data {files[0]} "
        f"--eval-prompt-data {files[1]} --eval-interval 1 --reward-function {files[2]}:f"
    )
    config = parse_arguments(arguments.split())
    before = input_digests(config)
    assert changed_inputs(before, input_digests(config)) == []
    assert {name.split()[1] for name in before} == set(map(str, files))
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content + b" ")
        (line,) = changed_inputs(before, input_digests(config))
        assert line.endswith(f" {file}: its content was edited")
        file.write_bytes(content)
