"""Defines ``Rollout``, the typed record of every rollout, and its checks.

Readers, the sampler and users all build ``Rollout``. Its constructor converts and checks every field, so other code can
rely on its dtypes, lengths and value ranges. Checks are vectorized and name the field, the first invalid entry and the
reason; readers add the file and the row.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_dta.core.common.errors import InputError

MAX_TOKEN_ID = 2**31 - 1
MAX_EXPERT = 2**15 - 1
# The difference of a logit and the log-sum-exp of all may round to above 0: in float32 by this for logits of 10,000, as
# low temperatures make them. A larger value is not a logprob.
LOGPROB_ROUNDING = 1e-3


@dataclass(frozen=True, eq=False)
class Rollout:
    """One training sample: token ids as sampled, which of them are trained, and what is known about it.

    Lists and arrays of the right kind are accepted and converted; anything else raises ``InputError`` naming the field.

    Attributes:
        token_ids: int32 [T], T >= 1: token ids as sampled, prompt included.
        loss_mask: bool [T]: True where the token is trained; never at the first token, which has no prefix.
        reward: reward of the whole trajectory, finite; None if unknown.
        advantages: float32 [T]: advantage of each token; replaces the one computed from rewards.
        logprobs: float32 [T]: the sampler's logprob of each token given those before it; 0 at untrained tokens.
        group_id: rollouts of one prompt, whose rewards are compared.
        trajectory_id: shared by the samples cut from one trajectory, whose reward counts once in its group. None: the
            sample is a whole trajectory.
        policy_version: version of the weights that sampled it, from 0; of several, the oldest.
        token_versions: int64 [T]: version of the weights that sampled each token, -1 at untrained tokens. The oldest is
            ``policy_version``.
        routed_experts: int16 [T x L x K]: experts that the sampler's routers chose, by token, then by layer with
            experts, K a layer; -1 where unknown. For --moe-routing-replay.
        segment_ends: int32 [D], ascending: end of each node of the sampled tree on this path, the prompt first, T last.
        branches: int32 [D]: which child of its parent each of those nodes is, 0 for the prompt. Rollouts of a group
            with equal branches up to a node share that node.
        segment_rewards: float32 [D]: reward received at the end of each node; their sum is ``reward``, in a sample of
            a later turn the part of it that was still to come. None: all of it at the end.
        leaf_weight: probability of this leaf in a walk from the root that takes all children of a node with equal
            probability; 0 if the leaf does not count in unbiased means. None: all rollouts of the group count equally.
        teacher: name of the teacher that scores it, for distillation; None: the first one.
        fallback: whether the leaf was grown from a node to which sampling returned after its query ran out of paths.
    """

    token_ids: np.ndarray
    loss_mask: np.ndarray
    reward: float | None = None
    advantages: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    group_id: str = "0"
    trajectory_id: str | None = None
    policy_version: int | None = None
    token_versions: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    segment_ends: np.ndarray | None = None
    branches: np.ndarray | None = None
    segment_rewards: np.ndarray | None = None
    leaf_weight: float | None = None
    fallback: bool | None = None
    teacher: str | None = None

    def __post_init__(self) -> None:
        values = vars(self)
        token_ids = values["token_ids"] = _checked_token_ids(self.token_ids)
        loss_mask = values["loss_mask"] = _checked_loss_mask(self.loss_mask, len(token_ids))
        for name, check in _CHECKS.items():
            if values[name] is not None or name == "group_id":
                values[name] = check(values[name], loss_mask)
        if self.token_versions is not None:
            oldest = int(self.token_versions[loss_mask].min())
            if self.policy_version not in (None, oldest):
                version = self.policy_version
                raise field_error("policy_version", f"is {version}, but the oldest of token_versions is {oldest}")
            values["policy_version"] = oldest
        values |= _checked_tree_fields(self, len(token_ids))

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.loss_mask))


def _checked_tree_fields(rollout: Rollout, length: int) -> dict[str, Any]:
    """The converted fields of a sampled tree; ``length`` is T."""
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
        raise field_error(absent, f"missing, although {present} is given")
    if rollout.segment_ends is None:
        if rollout.segment_rewards is not None:
            raise field_error("segment_rewards", "given without segment_ends")
        return values
    ends = _to_array(rollout.segment_ends, "segment_ends", _INTEGERS)
    if not len(ends) or ends[0] < 1 or (ends[1:] <= ends[:-1]).any() or ends[-1] != length:
        raise field_error("segment_ends", f"must rise from at least 1 to the number of tokens, {length}")
    branches = _to_array(rollout.branches, "branches", _INTEGERS)
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


def parts_of(whole: Rollout, lengths: np.ndarray, others: Iterable[Mapping[str, Any]]) -> list[Rollout]:
    """Consecutive parts of ``whole``, checked together: a fraction of the time of as many constructors.

    Args:
        whole: tokens, masks and logprobs of all parts.
        lengths: int64 [n], tokens of each part.
        others: the other fields of each part; the versions must agree.
    """
    ends = lengths.cumsum()
    if ends[-1] != len(whole):
        raise ValueError(f"the parts have {ends[-1]} of {len(whole)} tokens")
    if not (np.logical_or.reduceat(whole.loss_mask, ends - lengths) & ~whole.loss_mask[ends - lengths]).all():
        raise ValueError("a part must begin with a token that is not trained, and have a trained one")
    parts, empty = [], {field.name: field.default for field in fields(Rollout)}
    for begin, end, given in zip((ends - lengths).tolist(), ends.tolist(), others, strict=True):
        part = object.__new__(Rollout)
        mask, logprobs = whole.loss_mask[begin:end], whole.logprobs[begin:end]
        more = {n: _CHECKS[n](v, mask) if n in _CHECKS else v for n, v in given.items() if v is not None}
        vars(part).update(empty, token_ids=whole.token_ids[begin:end], loss_mask=mask, logprobs=logprobs, **more)
        vars(part).update(_checked_tree_fields(part, end - begin))
        parts.append(part)
    return parts


FIELD_NAMES = tuple(field.name for field in fields(Rollout))
REQUIRED_FIELDS = ("token_ids", "loss_mask")


def field_error(name: str, reason: str) -> InputError:
    """The error of one field; readers prefix the file and the row."""
    return InputError(f"field '{name}': {reason}")


def row_error(path: object, row: int, reason: object) -> InputError:
    """``reason`` with the file and the row, which counts from 1; in JSONL it is the line."""
    return InputError(f"{path}: row {row}: {reason}")


def check_field_names(names: Collection[str]) -> None:
    """Refuse a name that is not a field of the record; the message suggests the closest field."""
    for name in names:
        if name not in FIELD_NAMES:
            close = difflib.get_close_matches(name, FIELD_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean '{close[0]}'? " if close else ""
            raise field_error(printable(name), f"no such field; {hint}fields are {', '.join(FIELD_NAMES)}")


def rollout_from_fields(values: Mapping[str, Any]) -> Rollout:
    """The record of one stored row. A field that is None counts as missing; names must have been checked.

    ``group_id`` may be missing only if no advantage is computed from the reward: a default group would silently
    normalize the rewards of unrelated prompts together.
    """
    present = {name: value for name, value in values.items() if value is not None}
    for name in REQUIRED_FIELDS:
        if name not in present:
            raise field_error(name, "missing")
    if "group_id" not in present and "reward" in present and "advantages" not in present:
        raise field_error("group_id", "missing; the reward is compared within its group, so the group must be named")
    return Rollout(**present)


def check_vocabulary(rollout: Rollout, vocab_size: int) -> None:
    """Refuse token ids outside the model's vocabulary."""
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
            raise ValueError(f"require: {sorted(unknown)} are not fields of a rollout")
        if all(getattr(rollout, name) is None for name in names):
            advice = "; --old-logprobs recompute does without it" if need == "logprobs" else ""
            raise field_error(" or ".join(names), "missing, and the objective needs it" + advice)


def printable(value: object, limit: int = 40) -> str:
    """``value`` on one line and at most ``limit`` characters long, safe on any terminal."""
    text = repr(value)[1:-1] if isinstance(value, str) else repr(value)
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= limit else text[: limit - 3] + "..."


class _Entries(NamedTuple):
    """Entries that an array field accepts: NumPy's kinds, for lists the Python types (all within one of the sets), the
    type of a list's array, and the words for a message.
    """

    kinds: str
    types: tuple[set[type], ...]
    dtype: type
    what: str


_INTEGERS = _Entries("iu", ({int},), np.int64, "an integer")
_NUMBERS = _Entries("fiu", ({int, float},), np.float64, "a number")
_FLAGS = _Entries("biu", ({bool}, {int}), np.int64, "true or false (or 1 or 0) like the others")


def _list_to_array(value: list | tuple, name: str, entries: _Entries) -> np.ndarray:
    """A list as an array. Types are compared first, because NumPy would convert True, '3' and 2.0."""
    present = set(map(type, value))
    if not any(present <= kinds for kinds in entries.types):
        kinds = max(entries.types, key=lambda kinds: sum(type(entry) in kinds for entry in value[:1]))
        at = next(i for i, entry in enumerate(value) if type(entry) not in kinds)
        raise field_error(name, f"entry {at} is {_describe(value[at])}, not {entries.what}")
    try:
        return np.array(value, dtype=entries.dtype)
    except OverflowError:
        raise field_error(name, "holds a number that is too large") from None


def _describe(value: object) -> str:
    kind = {list: "a list", dict: "an object", type(None): "null", np.ndarray: "an array"}.get(type(value))
    return kind or f"{printable(value)} ({type(value).__name__})"


def _to_array(value: Any, name: str, entries: _Entries) -> np.ndarray:
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise field_error(name, f"has {value.ndim} dimensions, not 1")
        if value.dtype.kind not in entries.kinds:
            raise field_error(name, f"holds {value.dtype}, not {entries.what}")
        return value
    if not isinstance(value, (list, tuple)):
        raise field_error(name, f"is {_describe(value)}, not a list")
    return _list_to_array(value, name, entries)


def _check_length(array: np.ndarray, name: str, length: int, reference: str = "token_ids") -> None:
    if len(array) != length:
        raise field_error(name, f"has {len(array)} entries but {reference} has {length}")


def _refuse(bad: np.ndarray, array: np.ndarray, name: str, reason: str) -> None:
    """Raise an error that names the first entry of ``array`` that is ``bad``."""
    if np.count_nonzero(bad):  # a fraction of the time of ``any``
        at = int(bad.argmax())
        raise field_error(name, f"entry {at} is {array[at]}, {reason}")


def _checked_token_ids(value: Any) -> np.ndarray:
    array = _to_array(value, "token_ids", _INTEGERS)
    if len(array) == 0:
        raise field_error("token_ids", "is empty; a rollout has at least one token")
    _refuse(array < 0, array, "token_ids", "negative")
    if array.dtype != np.int32:
        _refuse(array > MAX_TOKEN_ID, array, "token_ids", "beyond 32 bits")
    return array.astype(np.int32, copy=False)


def _checked_loss_mask(value: Any, length: int) -> np.ndarray:
    array = _to_array(value, "loss_mask", _FLAGS)
    if array.dtype != bool:
        _refuse((array != 0) & (array != 1), array, "loss_mask", "not true or false (or 1 or 0)")
        array = array.astype(bool)
    _check_length(array, "loss_mask", length)
    if array[0]:
        raise field_error("loss_mask", "entry 0 is true, but the first token has no prefix to predict it from")
    if not np.count_nonzero(array):
        raise field_error("loss_mask", "no token is trained (every entry is false)")
    return array


def _checked_floats(value: Any, name: str, length: int, reference: str = "token_ids") -> np.ndarray:
    array = _to_array(value, name, _NUMBERS)
    _check_length(array, name, length, reference)
    if array.dtype == np.float32 and np.count_nonzero(np.isfinite(array)) == length:
        return array
    with np.errstate(over="ignore"):
        result = array.astype(np.float32, copy=False)
    overflows = np.isfinite(array) & ~np.isfinite(result)
    _refuse(~np.isfinite(result) & ~overflows, array, name, "not finite")
    _refuse(overflows, array, name, "beyond float32")
    return result


def _checked_logprobs(value: Any, loss_mask: np.ndarray) -> np.ndarray:
    array = _checked_floats(value, "logprobs", len(loss_mask))
    _refuse(array > LOGPROB_ROUNDING, array, "logprobs", "but a logprob is never positive")
    return np.where(loss_mask, array, np.float32(0))


def _checked_routing(value: Any, length: int) -> np.ndarray:
    name = "routed_experts"
    array = _to_array(value.reshape(-1) if isinstance(value, np.ndarray) else value, name, _INTEGERS)
    if len(array) == 0 or len(array) % length:
        raise field_error(name, f"has {len(array)} entries, no multiple of the {length} tokens")
    _refuse((array < -1) | (array > MAX_EXPERT), array, name, "neither an expert nor -1 for unknown")
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


def _checked_token_versions(value: Any, loss_mask: np.ndarray) -> np.ndarray:
    name = "token_versions"
    array = _to_array(value, name, _INTEGERS)
    _check_length(array, name, len(loss_mask))
    _refuse(loss_mask & ((array < 0) | (array >= 2**63)), array, name, "but versions of trained tokens count from 0")
    return np.where(loss_mask, array, -1).astype(np.int64)


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


# By field, what converts a value; the second argument is the converted loss mask.
_CHECKS: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "reward": lambda value, _: _checked_number(value, "reward"),
    "advantages": lambda value, loss_mask: _checked_floats(value, "advantages", len(loss_mask)),
    "logprobs": _checked_logprobs,
    "group_id": lambda value, _: _checked_text(value, "group_id"),
    "trajectory_id": lambda value, _: _checked_text(value, "trajectory_id"),
    "policy_version": lambda value, _: _checked_version(value),
    "token_versions": _checked_token_versions,
    "teacher": lambda value, _: _checked_text(value, "teacher"),
    "routed_experts": lambda value, loss_mask: _checked_routing(value, len(loss_mask)),
}
