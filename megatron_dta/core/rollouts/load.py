"""Loads and writes rollout files; the suffix selects the format, and a file is checked completely before use."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.jsonl import read_jsonl, write_jsonl
from megatron_dta.core.rollouts.lines import data_suffix
from megatron_dta.core.rollouts.paths import NodeCheck
from megatron_dta.core.rollouts.record import Rollout, check_required, check_vocabulary, row_error
from megatron_dta.core.rollouts.sample_granularity import SAMPLE_GRANULARITIES, cut_length, cut_turns

logger = logging.getLogger(__name__)


def load_rollouts(
    path: str | Path,
    sample_granularity: str = "trajectory",
    vocab_size: int | None = None,
    max_sequences: int | None = None,
    max_length: int | None = None,
    require: Collection[str] = (),
) -> list[Rollout]:
    """Load a ``.jsonl``, ``.parquet`` or ``.npz`` file; all of it is checked first.

    Args:
        sample_granularity: "trajectory", one sample per stored row, or "turn", one per run of trained tokens.
        vocab_size: token ids at or above it are refused.
        max_sequences: keep only the first samples.
        max_length: longer samples are cut; samples left without a trained token are dropped, which is logged.
        require: fields that the objective needs; ``"reward|advantages"`` asks for either.

    Raises:
        InputError: names the file, the row (from 1; the line of a JSONL file), the field and the reason.
    """
    path = Path(path)
    if sample_granularity not in SAMPLE_GRANULARITIES:
        raise InputError(
            f"sample_granularity '{sample_granularity}' is not known; choose from {', '.join(SAMPLE_GRANULARITIES)}"
        )
    for name, limit in (("max_sequences", max_sequences), ("max_length", max_length), ("vocab_size", vocab_size)):
        if limit is not None and limit < 1:
            raise InputError(f"{name} is {limit}; it must be at least 1")
    samples: list[Rollout] = []
    rows = untrained = 0
    rewards: dict[tuple[str, str], tuple[float, int]] = {}
    nodes = NodeCheck()
    # The loop reads the whole file even after max_sequences, so that an invalid last row stops the run now.
    for row, rollout, turns in _records(path):
        rows += 1
        try:
            if vocab_size is not None:
                check_vocabulary(rollout, vocab_size)
            check_required(rollout, require)
            _check_one_reward(rollout, row, rewards)
            nodes.check(rollout, row)
        except InputError as error:
            raise row_error(path, row, error) from None
        if max_sequences is not None and len(samples) >= max_sequences:
            continue
        for sample in [rollout] if sample_granularity == "trajectory" else cut_turns(rollout, f"row {row}", turns):
            kept = sample if max_length is None else cut_length(sample, max_length)
            if kept is None:
                untrained += 1
            else:
                samples.append(kept)
    if not rows:
        raise InputError(f"{path}: holds no rollouts")
    if untrained:
        logger.warning("%s: left out %d samples: no trained token in their first %d", path, untrained, max_length)
    if not samples:
        raise InputError(
            f"{path}: no sample has a trained token in its first {max_length} tokens; raise that limit "
            "(--max-length, in training --seq-length)"
        )
    return samples[:max_sequences]


def load_chosen_rollouts(arguments: argparse.Namespace) -> list[Rollout]:
    """``load_rollouts`` of a command's FILE, --sample-granularity, --max-sequences and --max-length."""
    limits = arguments.max_sequences, arguments.max_length
    return load_rollouts(arguments.file, arguments.sample_granularity, None, *limits)


def write_rollouts(path: str | Path, rollouts: Sequence[Rollout]) -> None:
    """Write a ``.jsonl`` or ``.parquet`` file, by the suffix; it appears only when it is complete.

    Reading it gives the same records bit for bit.
    """
    path = Path(path)
    if not rollouts:
        raise InputError(f"{path}: there are no rollouts to write")
    if path.suffix == ".jsonl":
        write_jsonl(path, rollouts)
    elif path.suffix == ".parquet":
        # Imported on use, because pyarrow takes half a second.
        from megatron_dta.core.rollouts.parquet import write_parquet

        write_parquet(path, rollouts)
    else:
        raise InputError(f"{path}: rollouts are written as .jsonl or .parquet, not '{path.suffix}'")


def _records(path: Path) -> Iterator[tuple[int, Rollout, np.ndarray | None]]:
    """Yield (row, rollout, turns); turns are None if they follow from the loss mask."""
    suffix = data_suffix(path)
    if suffix not in (".jsonl", ".parquet", ".npz"):
        raise InputError(f"{path}: rollouts are read from .jsonl, .parquet or .npz, not '{path.suffix}'")
    if not path.exists():
        raise InputError(f"{path}: no such file")
    try:
        if suffix == ".npz":
            from megatron_dta.core.rollouts.npz import read_npz

            yield from read_npz(path)
            return
        if suffix == ".jsonl":
            reader = read_jsonl
        else:
            from megatron_dta.core.rollouts.parquet import read_parquet as reader
        for row, rollout in reader(path):
            yield row, rollout, None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_one_reward(rollout: Rollout, row: int, rewards: dict[tuple[str, str], tuple[float, int]]) -> None:
    """Refuse samples of one trajectory with different rewards, since they count once in their group."""
    if rollout.trajectory_id is None or rollout.reward is None or rollout.advantages is not None:
        return
    reward, first = rewards.setdefault((rollout.group_id, rollout.trajectory_id), (rollout.reward, row))
    if reward != rollout.reward:
        raise InputError(
            f"field 'reward': is {rollout.reward}, but {reward} in row {first} of the same trajectory_id "
            "(a trajectory has one reward; give per-token advantages for several)"
        )
