"""Reads the compact ``.npz`` form of trajectories: all sequences in one array, trained spans as begin and end.

    tokens     int [T]    all sequences one after another        span_off  int [S+1]   spans of sequence i: rows
    offsets    int [S+1]  sequence i = offsets[i] : offsets[i+1]                       span_off[i] : span_off[i+1]
    group      int [S]    prompt of sequence i                   span_beg  int [P]     first trained token of the span
    reward     float [S]  NaN where unknown                      span_end  int [P]     one past its last

Optional: ``group_names`` [G] strings; ``turn``, ``model``, ``trial`` [S] in files that store each turn as a sequence:
sequences with equal group, model and trial are then one trajectory. Other members are not read. Arrays of Python
objects, which NumPy would unpickle, are refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.record import Rollout, field_error, printable, row_error

_KINDS = {
    "tokens": "iu",
    "offsets": "iu",
    "group": "iu",
    "reward": "f",
    "span_off": "iu",
    "span_beg": "iu",
    "span_end": "iu",
}
_OPTIONAL_KINDS = {"group_names": "U", "turn": "iu", "model": "iu", "trial": "iu"}


def read_npz(path: Path) -> Iterator[tuple[int, Rollout, np.ndarray]]:
    """Yield (row, rollout, turns [n, 2]), with rows counted from 1; raises ``InputError`` for an inconsistent file."""
    arrays = _load_arrays(path)
    try:
        _check_arrays(arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    tokens, offsets, span_off = arrays["tokens"], arrays["offsets"], arrays["span_off"]
    spans = np.stack([arrays["span_beg"].astype(np.int64), arrays["span_end"].astype(np.int64)], axis=1)
    for i, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        turns = spans[span_off[i] : span_off[i + 1]]
        try:
            group_id = _group_id(arrays, i)
            rollout = Rollout(
                token_ids=tokens[begin:end],
                loss_mask=_mask(turns, end - begin),
                reward=None if np.isnan(arrays["reward"][i]) else float(arrays["reward"][i]),
                group_id=group_id,
                trajectory_id=f"{group_id}/{arrays['model'][i]}/{arrays['trial'][i]}" if "turn" in arrays else None,
            )
        except InputError as error:
            raise row_error(path, i + 1, error) from None
        yield i + 1, rollout, turns


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: is not an npz (zip) file, or is cut short")
    arrays = {}
    name = "the archive"
    try:
        with np.load(path, allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise InputError(f"{path}: is not an npz (zip) file")
            members = set(archive.files)
            for name in (*_KINDS, *_OPTIONAL_KINDS):
                if name in members:
                    arrays[name] = archive[name]
    except InputError:
        raise
    except Exception as error:  # zipfile, zlib, lzma, struct and NumPy's header parser raise on damaged archives
        reason = printable(str(error).split("\n")[0], limit=160)
        raise InputError(f"{path}: field '{name}': cannot be read (damaged, or not a plain array): {reason}") from None
    return arrays


def _check_arrays(arrays: dict[str, np.ndarray]) -> None:
    for name in _KINDS:
        if name not in arrays:
            raise field_error(name, "missing from the npz file")
    for name, array in arrays.items():
        kinds = _KINDS.get(name) or _OPTIONAL_KINDS[name]
        if array.ndim != 1 or array.dtype.kind not in kinds:
            what = {"iu": "integers", "f": "floats", "U": "strings"}[kinds]
            raise field_error(name, f"holds {array.dtype} of shape {array.shape}, not {what} in one dimension")
    sequences = len(arrays["offsets"]) - 1
    _check_offsets(arrays["offsets"], "offsets", "tokens", len(arrays["tokens"]))
    for name in ("group", "reward", "turn", "model", "trial"):
        if name in arrays and len(arrays[name]) != sequences:
            raise field_error(name, f"has {len(arrays[name])} entries but offsets describe {sequences} sequences")
    if len(arrays["span_off"]) != sequences + 1:
        raise field_error("span_off", f"has {len(arrays['span_off'])} entries but offsets has {sequences + 1}")
    if len(arrays["span_beg"]) != len(arrays["span_end"]):
        raise field_error(
            "span_end", f"has {len(arrays['span_end'])} entries but span_beg has {len(arrays['span_beg'])}"
        )
    _check_offsets(arrays["span_off"], "span_off", "span_beg", len(arrays["span_beg"]))
    if "turn" in arrays and not {"model", "trial"} <= arrays.keys():
        raise field_error("turn", "needs 'model' and 'trial', which tell the trajectories apart")


def _check_offsets(offsets: np.ndarray, name: str, of: str, total: int) -> None:
    if len(offsets) == 0:
        raise field_error(name, "is empty; it starts with 0")
    if offsets[0] != 0:
        raise field_error(name, f"starts with {offsets[0]}, not 0")
    falls = offsets[1:] < offsets[:-1]
    if falls.any():
        at = int(falls.argmax()) + 1
        raise field_error(name, f"entry {at} is {offsets[at]}, below the {offsets[at - 1]} before it")
    if offsets[-1] != total:
        raise field_error(name, f"ends with {offsets[-1]} but {of} has {total} entries")


def _group_id(arrays: dict[str, np.ndarray], i: int) -> str:
    group, names = int(arrays["group"][i]), arrays.get("group_names")
    if names is None:
        return str(group)
    if not 0 <= group < len(names):
        raise field_error("group", f"is {group}, but group_names has {len(names)} entries")
    return str(names[group])


def _mask(turns: np.ndarray, length: int) -> np.ndarray:
    """bool [length] from a sequence's spans [n, 2], which must be in order, not empty and disjoint."""
    begin, end = turns[:, 0], turns[:, 1]
    for bad, reason in (
        (begin < 0, "begins before the sequence"),
        (end > length, f"ends beyond the sequence of {length} tokens"),
        (end <= begin, "is empty"),
        (np.append(False, begin[1:] < end[:-1]), "overlaps the span before it"),
    ):
        if bad.any():
            at = int(bad.argmax())
            raise field_error("span_beg, span_end", f"span {at} ({begin[at]} to {end[at]}) {reason}")
    mask = np.zeros(length, bool)
    for b, e in zip(begin.tolist(), end.tolist(), strict=True):
        mask[b:e] = True
    return mask
