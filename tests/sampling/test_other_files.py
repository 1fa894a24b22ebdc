"""Files as people have them: gzipped, with a byte order mark, as one JSON array; all others are named in one line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from megatron_dta.common.rows import field_names, read_rows
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.sampling.prompts.text_rollouts import holds_text

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
