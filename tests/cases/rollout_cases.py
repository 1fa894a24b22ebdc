"""Random rollouts and their exact comparison, for the tests of rollout files."""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.rollouts.load import load_rollouts
from megatron_dta.core.rollouts.record import FIELD_NAMES, Rollout

# Two sequences of 4 and 3 tokens, with two turns and one.
GOOD_NPZ = {
    "tokens": np.arange(7, dtype=np.int32),
    "offsets": np.array([0, 4, 7]),
    "group": np.array([0, 1], np.int32),
    "reward": np.array([1.0, np.nan], np.float32),
    "span_off": np.array([0, 2, 3]),
    "span_beg": np.array([1, 3, 2], np.int32),
    "span_end": np.array([2, 4, 3], np.int32),
    "group_names": np.array(["x", "y"]),
}


def random_rollout(rng: np.random.Generator, length: int | None = None) -> Rollout:
    """Every optional field present or not at random, float32 values over their whole range."""
    length = length or int(rng.integers(2, 60))
    loss_mask = rng.random(length) < 0.4
    loss_mask[0], loss_mask[-1] = False, True
    wide = (rng.standard_normal(length) * 10.0 ** rng.integers(-40, 38, length)).astype(np.float32)
    return Rollout(
        token_ids=rng.integers(0, 2**31, length).astype(np.int32),
        loss_mask=loss_mask,
        reward=float(rng.standard_normal()) if rng.random() < 0.7 else None,
        advantages=wide if rng.random() < 0.5 else None,
        logprobs=-np.abs(wide) if rng.random() < 0.5 else None,
        group_id=rng.choice(["a", "Größe 数\u2028", "0", 'quote " and \\ \n']),
        trajectory_id=f"t{rng.integers(10**9)}" if rng.random() < 0.5 else None,
        policy_version=int(rng.integers(0, 2**62)) if rng.random() < 0.5 else None,
        routed_experts=rng.integers(-1, 8, 4 * length).astype(np.int16) if rng.random() < 0.3 else None,
    )


def assert_same(actual: Rollout, expected: Rollout) -> None:
    for name in FIELD_NAMES:
        a, b = getattr(actual, name), getattr(expected, name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name
            assert type(a) is type(b), name


def assert_refused(path: Path, *parts: str, **options: object) -> None:
    """Loading raises an ``InputError`` of one line that names the file and has all ``parts``."""
    with pytest.raises(InputError, match=".*".join(parts)) as caught:
        load_rollouts(path, **options)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.isprintable()


def check_failed_write(path: Path, write: Callable[[Path, Iterable[Rollout]], None]) -> None:
    """A write that fails leaves the old file, and nothing beside it."""
    path.write_text("old")

    def rollouts() -> Iterator[Rollout]:
        yield random_rollout(seed_all(0))
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write(path, rollouts())
    assert path.read_text() == "old"
    assert len(list(path.parent.iterdir())) == 1


VALUES = [None, True, False, 0, 1, -1, 3, 2**31, 10**25, 0.5, -2.5, 1e39, float("nan"), float("inf"), "", "a", "\ud800"]


def damage(content: bytes, rng: random.Random) -> bytes:
    """One random edit of the bytes."""
    at, length = rng.randrange(len(content)), rng.randrange(1, 40)
    edit = rng.randrange(6)
    if edit == 0:
        return content[:at]
    if edit == 1:
        return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]
    if edit == 2:
        return content[:at] + content[at + length :]
    if edit == 3:
        return content[:at] + rng.randbytes(length) + content[at:]
    if edit == 4:
        return content[:at] + rng.randbytes(length) + content[at + length :]
    return content[:at] + content[at : at + length] * 2 + content[at + length :]
