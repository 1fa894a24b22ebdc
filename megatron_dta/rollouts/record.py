"""Defines ``Rollout``, the typed record of every rollout, and its checks.

Readers, the sampler and users all build ``Rollout``. Its constructor converts and checks every field, so other code can
rely on its dtypes, lengths and value ranges. Checks are vectorized and name the field, the first invalid entry and the
reason; readers add the file and the row.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_dta.common.errors import InputError

MAX_TOKEN_ID = 2**31 - 1
MAX_EXPERT = 2**15 - 1
# The log-softmax of some samplers rounds to slightly above 0; a larger value is not a logprob.
LOGPROB_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class Rollout:
    """One training sample: token ids as sampled, what is trained, and what is known about it. T is its length.

    Lists and arrays of the right kind are accepted and converted; anything else raises ``InputError`` naming the field.
    """

    token_ids: np.ndarray
    """int32 [T], T >= 1: token ids as sampled, prompt included."""
    loss_mask: np.ndarray
    """bool [T]: True where the token is trained; never at the first token, which has no prefix to predict it from."""
    reward: float | None = None
    """Reward of the whole trajectory, finite; None where unknown."""
    advantages: np.ndarray | None = None
    """float32 [T]: advantage of each token; replaces the one computed from rewards."""
    logprobs: np.ndarray | None = None
    """float32 [T]: the sampler's logprob of token t given the tokens before it; 0 where the token is not trained."""
    group_id: str = "0"
    """Rollouts of one prompt, whose rewards are normalised together."""
    trajectory_id: str | None = None
    """Shared by the samples cut from one trajectory, whose reward counts once. None: a trajectory of its own."""
    policy_version: int | None = None
    """Version of the weights that sampled it, counted from 0."""
    routed_experts: np.ndarray | None = None
    """int16 [T x L x K]: experts that the sampler's routers chose, token by token, within it layer by layer (those with
    experts), K a layer; -1 where unknown. For --moe-routing-replay."""
    segment_ends: np.ndarray | None = None
    """int32 [D], rising: where each node of the sampled tree on this path ends, the prompt first; the last is T."""
    branches: np.ndarray | None = None
    """int32 [D]: which child of its parent each of those nodes is, 0 for the prompt. Rollouts of a group with equal
    branches up to a node share that node."""
    segment_rewards: np.ndarray | None = None
    """float32 [D]: reward received at the end of each node; their sum is ``reward``. None: all of it at the end."""
    leaf_weight: float | None = None
    """Probability of this leaf when one walks down the tree and takes each child of a node alike; 0 where the leaf does
    not count in unbiased means. None: the rollouts of the group are independent and count alike."""
    fallback: bool | None = None
    """Whether the leaf was grown from a node to which sampling went back after its query had run out of paths."""

    def __post_init__(self) -> None:
        token_ids = _checked_token_ids(self.token_ids)
        loss_mask = _checked_loss_mask(self.loss_mask, len(token_ids))
        values: dict[str, Any] = {"token_ids": token_ids, "loss_mask": loss_mask}
        if self.reward is not None:
            values["reward"] = _checked_number(self.reward, "reward")
        if self.advantages is not None:
            values["advantages"] = _checked_floats(self.advantages, "advantages", len(token_ids))
        if self.logprobs is not None:
            values["logprobs"] = _checked_logprobs(self.logprobs, loss_mask)
        values["group_id"] = _checked_text(self.group_id, "group_id")
        if self.trajectory_id is not None:
            values["trajectory_id"] = _checked_text(self.trajectory_id, "trajectory_id")
        if self.policy_version is not None:
            values["policy_version"] = _checked_version(self.policy_version)
        if self.routed_experts is not None:
            values["routed_experts"] = _checked_routing(self.routed_experts, len(token_ids))
        values |= checked_tree_fields(self, len(token_ids))
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.token_ids)


def checked_tree_fields(rollout: Rollout, length: int) -> dict[str, Any]:
    """The fields of a sampled tree as they are kept; ``length`` is T."""
    values: dict[str, Any] = {}
    if rollout.leaf_weight is not None:
        values["leaf_weight"] = _checked_number(rollout.leaf_weight, "leaf_weight")
        if not 0 <= values["leaf_weight"] <= 1:
            raise field_error("leaf_weight", f"is {values['leaf_weight']}, not between 0 and 1")
    if rollout.fallback is not None:
        if not isinstance(rollout.fallback, (bool, np.bool_)):
            raise field_error("fallback", f"is {_describe(rollout.fallback)}, not true or false")
        values["fallback"] = bool(rollout.fallback)
    if (rollout.segment_ends is None) != (rollout.branches is None):
        present, absent = ("segment_ends", "branches")[:: 1 if rollout.branches is None else -1]
        raise field_error(absent, f"missing beside {present}")
    if rollout.segment_ends is None:
        if rollout.segment_rewards is not None:
            raise field_error("segment_rewards", "given without segment_ends")
        return values
    ends = _to_array(rollout.segment_ends, "segment_ends", "iu", _INTEGERS, "an integer", np.int64)
    if not len(ends) or ends[0] < 1 or (np.diff(ends.astype(np.int64)) < 1).any() or ends[-1] != length:
        raise field_error("segment_ends", f"must rise from at least 1 to the number of tokens, {length}")
    branches = _to_array(rollout.branches, "branches", "iu", _INTEGERS, "an integer", np.int64)
    if len(branches) != len(ends):
        raise field_error("branches", f"has {len(branches)} entries but segment_ends has {len(ends)}")
    if branches[0] != 0 or branches.min() < 0 or branches.max() > MAX_TOKEN_ID:
        raise field_error("branches", "must begin with 0, the prompt, and hold no negative number")
    values |= {"segment_ends": ends.astype(np.int32), "branches": branches.astype(np.int32)}
    if rollout.segment_rewards is not None:
        values["segment_rewards"] = _checked_floats(
            rollout.segment_rewards, "segment_rewards", len(ends), "segment_ends"
        )
    return values


FIELD_NAMES = tuple(field.name for field in fields(Rollout))
REQUIRED_FIELDS = ("token_ids", "loss_mask")


def field_error(name: str, reason: str) -> InputError:
    """The error of one field; readers prefix the file and the row."""
    return InputError(f"field '{name}': {reason}")


def row_error(path: object, row: int, reason: object) -> InputError:
    """``reason`` with its place: ``row`` counts from 1, and in JSONL is the line."""
    return InputError(f"{path}: row {row}: {reason}")


def check_field_names(names: Collection[str]) -> None:
    """Refuse a name that is no field of the record, with the closest one that is."""
    for name in names:
        if name not in FIELD_NAMES:
            close = difflib.get_close_matches(name, FIELD_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'? " if close else ""
            raise field_error(printable(name), f"no such field; {hint}fields are {', '.join(FIELD_NAMES)}")


def rollout_from_fields(values: Mapping[str, Any]) -> Rollout:
    """The record of one stored row. A field that is None counts as missing; names must have been checked.

    ``group_id`` may be left out only where no advantage is computed from the reward: one group by default would
    normalise the rewards of unrelated prompts together without a word.
    """
    present = {name: value for name, value in values.items() if value is not None}
    for name in REQUIRED_FIELDS:
        if name not in present:
            raise field_error(name, "missing")
    if "group_id" not in present and "reward" in present and "advantages" not in present:
        raise field_error("group_id", "missing; the reward is compared within its group, so the group must be named")
    return Rollout(**present)


def check_vocabulary(rollout: Rollout, vocab_size: int) -> None:
    """Refuse token ids that the model has no embedding for."""
    if int(rollout.token_ids.max()) >= vocab_size:
        at = int(np.argmax(rollout.token_ids >= vocab_size))
        reason = f"entry {at} is {rollout.token_ids[at]}, outside the vocabulary of {vocab_size} tokens"
        raise field_error("token_ids", reason)


def check_required(rollout: Rollout, require: Collection[str]) -> None:
    """Refuse a rollout without a field that the objective needs; ``"a|b"`` asks for either."""
    for need in require:
        names = need.split("|")
        unknown = set(names) - set(FIELD_NAMES)
        if unknown:
            raise ValueError(f"require: {sorted(unknown)} is no field of a rollout")
        if all(getattr(rollout, name) is None for name in names):
            advice = "; --old-logprobs recompute does without it" if need == "logprobs" else ""
            raise field_error(" or ".join(names), "missing, and the objective needs it" + advice)


def printable(value: object, limit: int = 40) -> str:
    """``value`` on one line and at most ``limit`` characters long, safe on any terminal."""
    text = repr(value)[1:-1] if isinstance(value, str) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


_Types = tuple[frozenset[type], ...]


def _list_to_array(value: list | tuple, name: str, allowed: _Types, what: str, dtype: type) -> np.ndarray:
    """A list as an array, its entries' types all within one of ``allowed``: NumPy would convert True, '3' and 2.0."""
    types = set(map(type, value))
    if not any(types <= kinds for kinds in allowed):
        kinds = max(allowed, key=lambda kinds: sum(type(entry) in kinds for entry in value[:1]))
        at = next(i for i, entry in enumerate(value) if type(entry) not in kinds)
        raise field_error(name, f"entry {at} is {_describe(value[at])}, not {what}")
    try:
        return np.array(value, dtype=dtype)
    except OverflowError:
        raise field_error(name, "holds a number that is too large") from None


def _describe(value: object) -> str:
    kind = {list: "a list", dict: "an object", type(None): "null", np.ndarray: "an array"}.get(type(value))
    return kind or f"{printable(value)} ({type(value).__name__})"


def _to_array(value: Any, name: str, kinds: str, allowed: _Types, what: str, dtype: type) -> np.ndarray:
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise field_error(name, f"has {value.ndim} dimensions, not 1")
        if value.dtype.kind not in kinds:
            raise field_error(name, f"holds {value.dtype}, not {what}")
        return value
    if not isinstance(value, (list, tuple)):
        raise field_error(name, f"is {_describe(value)}, not a list")
    return _list_to_array(value, name, allowed, what, dtype)


_INTEGERS = (frozenset({int}),)
_FLAGS = (frozenset({bool}), frozenset({int}))
_NUMBERS = (frozenset({int, float}),)


def _check_length(array: np.ndarray, name: str, length: int, beside: str = "token_ids") -> None:
    if len(array) != length:
        raise field_error(name, f"has {len(array)} entries but {beside} has {length}")


def _checked_token_ids(value: Any) -> np.ndarray:
    array = _to_array(value, "token_ids", "iu", _INTEGERS, "an integer", np.int64)
    if len(array) == 0:
        raise field_error("token_ids", "is empty; a rollout has at least one token")
    for bad, reason in ((array < 0, "negative"), (array > MAX_TOKEN_ID, "beyond 32 bits")):
        if bad.any():
            at = int(bad.argmax())
            raise field_error("token_ids", f"entry {at} is {array[at]}, {reason}")
    return array.astype(np.int32, copy=False)


def _checked_loss_mask(value: Any, length: int) -> np.ndarray:
    array = _to_array(value, "loss_mask", "biu", _FLAGS, "true or false (or 1 or 0) like the others", np.int64)
    if array.dtype != bool:
        bad = (array != 0) & (array != 1)
        if bad.any():
            at = int(bad.argmax())
            raise field_error("loss_mask", f"entry {at} is {array[at]}, not true or false (or 1 or 0)")
        array = array.astype(bool)
    _check_length(array, "loss_mask", length)
    if array[0]:
        raise field_error("loss_mask", "entry 0 is true, but the first token has no prefix to predict it from")
    if not array.any():
        raise field_error("loss_mask", "no token is trained (every entry is false)")
    return array


def _checked_floats(value: Any, name: str, length: int, beside: str = "token_ids") -> np.ndarray:
    array = _to_array(value, name, "fiu", _NUMBERS, "a number", np.float64)
    _check_length(array, name, length, beside)
    with np.errstate(over="ignore"):
        result = array.astype(np.float32, copy=False)
    finite = np.isfinite(result)
    if not finite.all():
        at = int(np.argmin(finite))
        reason = "beyond float32" if np.isfinite(array[at]) else "not finite"
        raise field_error(name, f"entry {at} is {array[at]}, {reason}")
    return result


def _checked_logprobs(value: Any, loss_mask: np.ndarray) -> np.ndarray:
    array = _checked_floats(value, "logprobs", len(loss_mask))
    positive = array > LOGPROB_ROUNDING
    if positive.any():
        at = int(positive.argmax())
        raise field_error("logprobs", f"entry {at} is {array[at]}, but a logprob is never positive")
    return np.where(loss_mask, array, np.float32(0))


def _checked_routing(value: Any, length: int) -> np.ndarray:
    if isinstance(value, np.ndarray):
        value = value.reshape(-1)
    array = _to_array(value, "routed_experts", "iu", _INTEGERS, "an integer", np.int64)
    if len(array) == 0 or len(array) % length:
        raise field_error("routed_experts", f"has {len(array)} entries, no multiple of the {length} tokens")
    bad = (array < -1) | (array > MAX_EXPERT)
    if bad.any():
        at = int(bad.argmax())
        raise field_error("routed_experts", f"entry {at} is {array[at]}, neither an expert nor -1 for unknown")
    return array.astype(np.int16, copy=False)


def _checked_number(value: Any, name: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise field_error(name, f"is {_describe(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise field_error(name, f"is {number}, not finite")
    return number


def _checked_version(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise field_error("policy_version", f"is {_describe(value)}, not an integer")
    if not 0 <= value < 2**63:
        raise field_error("policy_version", f"is {printable(value)}; versions count from 0; leave it out if unknown")
    return int(value)


def _checked_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise field_error(name, f"is {_describe(value)}, not a string")
    if not value:
        raise field_error(name, "is empty")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise field_error(name, f"is '{printable(value)}', which is not valid Unicode") from None
    return str(value)
