"""Rollouts as Parquet: exact round trips, columns of other widths, bad columns and damage refused in one line."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts, write_rollouts
from megatron_dta.core.rollouts.parquet import write_parquet
from megatron_dta.core.rollouts.record import Rollout
from rollout_cases import assert_refused, assert_same, check_failed_write, damage, random_rollout

GOOD = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "group_id": "a"}


def test_round_trip_is_exact_in_many_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, path = seed_all(5), tmp_path / "r.parquet"
    monkeypatch.setattr("megatron_dta.core.rollouts.parquet.ROW_GROUP_TOKENS", 100)
    routing = rng.integers(0, 9, (4, 2, 2)).astype(np.int16)
    routed = Rollout(np.arange(4), np.arange(4) > 0, advantages=np.ones(4), routed_experts=routing)
    rollouts = [*(random_rollout(rng) for _ in range(300)), routed]
    write_rollouts(path, rollouts)
    assert pq.ParquetFile(path).num_row_groups > 20
    for loaded, expected in zip(load_rollouts(path), rollouts, strict=True):
        assert_same(loaded, expected)
    turns = [load_rollouts(tmp_path / name, sample_granularity="turn") for name in (path, _as_jsonl(path, rollouts))]
    for loaded, expected in zip(*turns, strict=True):
        assert_same(loaded, expected)


def _as_jsonl(path: Path, rollouts: list[Rollout]) -> str:
    write_rollouts(path.with_suffix(".jsonl"), rollouts)
    return "r.jsonl"


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    check_failed_write(tmp_path / "r.parquet", write_parquet)


@pytest.mark.parametrize(
    ("entries", "text", "make_list"),
    [
        (pa.int64(), pa.large_string(), pa.large_list),
        (pa.uint16(), pa.dictionary(pa.int8(), pa.string()), lambda kind: pa.list_(kind, 3)),
    ],
)
def test_columns_of_other_widths(tmp_path: Path, entries: pa.DataType, text: pa.DataType, make_list) -> None:
    columns = {
        "token_ids": pa.array([[1, 2, 3], [4, 5, 6]], make_list(entries)),
        "loss_mask": pa.array([[0, 1, 0], [0, 0, 1]], make_list(pa.int8())),
        "advantages": pa.array([[0.5, 1.5, -2.0], None], make_list(pa.float64())),
        "reward": pa.array([1, 0], pa.int32()),
        "group_id": pa.array(["a", "b"]).cast(text),
        "policy_version": pa.array([None, 3], pa.int32()),
        "logprobs": pa.nulls(2),
    }
    pq.write_table(pa.table(columns), tmp_path / "r.parquet")
    first, second = load_rollouts(tmp_path / "r.parquet")
    assert_same(first, Rollout([1, 2, 3], [False, True, False], 1, np.array([0.5, 1.5, -2.0]), group_id="a"))
    assert_same(second, Rollout([4, 5, 6], [False, False, True], 0.0, group_id="b", policy_version=3))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"token_ids": pa.array([[1.0, 2.0, 3.0]])}, "field 'token_ids': the column has type"),
        ({"token_ids": pa.array([5])}, "field 'token_ids': the column has type"),
        ({"loss_mask": pa.array([[0.0, 1.0, 1.0]])}, "field 'loss_mask': the column has type"),
        ({"reward": pa.array([True])}, "field 'reward': the column has type"),
        ({"group_id": pa.array([1])}, "field 'group_id': the column has type"),
        ({"rewards": pa.array([1.0])}, "field 'rewards': no such field; did you mean 'reward'"),
        ({"token_ids": pa.nulls(1)}, "row 1: field 'token_ids': missing"),
        ({"token_ids": pa.array([[1, None, 3]])}, "row 1: field 'token_ids': entry 1 is null"),
    ],
)
def test_bad_columns(tmp_path: Path, columns: dict, reason: str) -> None:
    good = {key: pa.array([value]) for key, value in GOOD.items()}
    pq.write_table(pa.table(good | columns), tmp_path / "r.parquet")
    assert_refused(tmp_path / "r.parquet", reason, vocab_size=100)


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    write_rollouts(path, [random_rollout(seed_all(0)) for _ in range(20)])
    path.write_bytes(path.read_bytes()[:-20])
    assert_refused(path, "cannot be read as Parquet after row 0")
    good = {key: pa.array([value]) for key, value in GOOD.items()}
    pq.write_table(pa.table({key: array[:0] for key, array in good.items()}), path)
    assert_refused(path, "holds no rollouts")
    path.unlink()
    path.mkdir()
    assert_refused(path, "cannot be read")


def load_or_refuse(path: Path, content: bytes) -> list[Rollout] | None:
    path.write_bytes(content)
    try:
        return load_rollouts(path)
    except InputError as error:
        message = str(error)
    assert message.startswith(f"{path}: ")
    assert message.isprintable()
    return None


def test_no_flipped_bit_changes_a_record(tmp_path: Path) -> None:
    """Every page has its checksum: a damaged file is refused, or the damage is not in the data."""
    path, rng = tmp_path / "r.parquet", random.Random(7)
    rollouts = [random_rollout(seed_all(7), length) for length in (2, 3, 9, 4)]
    write_rollouts(path, rollouts)
    content, refused = path.read_bytes(), 0
    positions = range(0, len(content), 19)
    for at in positions:
        flipped = content[at] ^ (1 << rng.randrange(8))
        loaded = load_or_refuse(path, content[:at] + bytes([flipped]) + content[at + 1 :])
        refused += loaded is None
        for actual, before in zip(loaded or rollouts, rollouts, strict=True):
            assert_same(actual, before)
    assert refused > len(positions) / 4
    assert sum(load_or_refuse(path, damage(content, rng) or b"x") is None for _ in range(50)) > 25
