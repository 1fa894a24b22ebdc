"""Every bad rollout file is refused in one line that names the file, the row, the field and the reason."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from conftest import REPOSITORY
from megatron_dta.core.rollouts.load import load_rollouts
from rollout_cases import GOOD_NPZ, assert_refused

GOOD = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "group_id": "a"}
BAD_FIELDS = [
    # (fields to change, field named, reason)
    ({"token_ids": None}, "token_ids", "missing"),
    ({"token_ids": []}, "token_ids", "is empty"),
    ({"token_ids": [1, -2, 3]}, "token_ids", "entry 1 is -2, negative"),
    ({"token_ids": [1, 2, 100]}, "token_ids", "entry 2 is 100, outside the vocabulary of 100 tokens"),
    ({"loss_mask": [False, True]}, "loss_mask", "has 2 entries but token_ids has 3"),
    ({"loss_mask": [False] * 3}, "loss_mask", "no token is trained"),
    ({"loss_mask": [True, True, True]}, "loss_mask", "first token has no prefix"),
    ({"reward": float("nan")}, "reward", "is nan, not finite"),
    ({"reward": 1.0, "group_id": None}, "group_id", "missing"),
    ({"policy_version": -1}, "policy_version", "count from 0"),
    ({"advantages": [0.0, float("inf"), 1.0]}, "advantages", "entry 1 is inf, not finite"),
    ({"logprobs": [0.0, 2**-7, -1.0]}, "logprobs", "entry 1 is 0.0078125, but a logprob is never positive"),
]
BAD_JSON_TYPES = [
    ({"token_ids": [1, True, 3]}, "token_ids", r"entry 1 is True \(bool\), not an integer"),
    ({"token_ids": [[1, 2, 3]]}, "token_ids", "entry 0 is a list, not an integer"),
    ({"loss_mask": {"a": 1}}, "loss_mask", "is an object, not a list"),
    ({"reward": "1.0"}, "reward", "not a number"),
    ({"logprobs": [0, None, -1]}, "logprobs", "entry 1 is null"),
    ({"group_id": 3}, "group_id", r"is 3 \(int\), not a string"),
    ({"group_id": "\ud800"}, "group_id", "not valid Unicode"),
    ({"token_idss": [1]}, "token_idss", "did you mean 'token_ids'"),
    ({"zzz": [1]}, "zzz", "no such field; fields are token_ids"),
]


def changed(changes: dict) -> dict:
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not None}


@pytest.mark.parametrize(("changes", "field", "reason"), BAD_FIELDS + BAD_JSON_TYPES)
def test_bad_jsonl_record(tmp_path: Path, changes: dict, field: str, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (GOOD, changed(changes), GOOD)))
    assert_refused(path, f"row 2: field '{field}': ", reason, vocab_size=100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"token_ids": [1, 2, 3], "loss_ma', "is not JSON: .*cut short"),
        (b"[1, 2, 3]", "is not a JSON object but list"),
        (b"\xff\xfe{}", "is not UTF-8"),
        (b'{"token_ids": [1, 2], "token_ids": [1, 3], "loss_mask": [0, 1]}', "field 'token_ids': given twice"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_jsonl_line(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line)
    assert_refused(path, "row 2: ", reason)


def test_requirements_of_the_objective(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ({**GOOD, "reward": 1}, GOOD)))
    assert len(load_rollouts(path)) == 2
    assert_refused(path, "row 2: field 'reward or advantages': missing", require=["reward|advantages"])
    assert_refused(path, "row 1: field 'logprobs': missing", require=("logprobs",))
    with pytest.raises(ValueError, match="not fields of a rollout"):
        load_rollouts(path, require=("rewards",))


def test_one_trajectory_has_one_reward(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    rows = [{**GOOD, "trajectory_id": "t", "reward": reward} for reward in (1.0, 1.0, 0.5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert_refused(path, "row 3: field 'reward': is 0.5, but 1.0 in row 1")
    rows[2]["group_id"] = "b"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(load_rollouts(path)) == 3


@pytest.mark.parametrize(
    ("form", "nothing", "text", "folder"),
    [
        (".jsonl", "holds no rollouts", "row 1: is not JSON", "Is a directory"),
        (".npz", "is not an npz", "is not an npz", "is not an npz"),
    ],
)
def test_files_that_are_none(tmp_path: Path, form: str, nothing: str, text: str, folder: str) -> None:
    path = tmp_path / f"r{form}"
    assert_refused(path, "no such file")
    path.touch()
    assert_refused(path, nothing)
    path.write_text("plain text\n")
    assert_refused(path, text)
    path.unlink()
    path.mkdir()
    assert_refused(path, folder)
    assert_refused(tmp_path / "r.csv", r"read from .jsonl, .parquet or .npz, not '\.csv'")
    assert_refused(tmp_path / "r", "not ''")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": None}, "field 'tokens': missing"),
        ({"tokens": np.arange(7.0)}, "field 'tokens': holds float64 of shape .7,., not integers"),
        ({"tokens": np.array([0, 1, 2, 3, 4, -5, 6])}, "row 2: field 'token_ids': entry 1 is -5, negative"),
        ({"offsets": np.array([0, 4])}, "field 'offsets': ends with 4 but tokens has 7"),
        ({"group": np.array([0, 2])}, "row 2: field 'group': is 2, but group_names has 2"),
        ({"span_beg": np.array([0, 3, 2])}, "row 1: field 'loss_mask': entry 0 is true"),
        ({"span_end": np.array([2, 4, 4])}, "row 2: field 'span_beg, span_end': span 0 .2 to 4. ends beyond"),
        ({"span_end": np.array([4, 4, 3])}, "row 1: field 'span_beg, span_end': span 1 .3 to 4. overlaps"),
        ({"turn": np.array([0, 0])}, "field 'turn': needs 'model' and 'trial'"),
    ],
)
def test_bad_npz(tmp_path: Path, changes: dict, reason: str) -> None:
    path = tmp_path / "r.npz"
    np.savez(path, **{k: v for k, v in {**GOOD_NPZ, **changes}.items() if v is not None})
    assert_refused(path, reason)


def test_pickle_is_never_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickled object in an npz, under an own name or as a whole file, is refused and not loaded."""
    ran = []

    class Harmful:
        def __reduce__(self):
            return (ran.append, (1,))

    path = tmp_path / "r.npz"
    np.savez(path, **{**GOOD_NPZ, "tokens": np.array([Harmful()], dtype=object)})
    assert_refused(path, "field 'tokens'")
    np.save(tmp_path / "r.npy", np.array([Harmful()], dtype=object))
    (tmp_path / "r.npy").rename(path)
    assert_refused(path, "is not an npz")
    assert not ran
    pattern = re.compile(r"\bimport (pickle|torch|megatron\.)|allow_pickle=True|torch\.load")
    for source in (REPOSITORY / "megatron_dta" / "core" / "rollouts").glob("*.py"):
        assert not pattern.search(source.read_text()), source
