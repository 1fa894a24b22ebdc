"""Which groups a stream takes for a batch: none becomes too old, however long they take."""

from __future__ import annotations

import pytest

from conftest import seed_all
from megatron_dta.extras.servers.stream.rollout_stream import StreamLimits, choose_groups


@pytest.mark.parametrize("seed", range(40))
def test_no_group_becomes_too_old_and_training_never_waits_forever(seed: int) -> None:
    rng = seed_all(seed)
    groups, steps = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    limits = StreamLimits(groups, steps, steps + int(rng.integers(0, 4)), 1000)
    step, version, number = 0, 0, 0
    begun: dict[int, int] = {}
    finished: dict[int, int] = {}
    for _ in range(600):
        # Servers have the newest weights or older ones.
        version = int(rng.integers(version, step + 1))
        while step + (len(begun) + len(finished)) // groups * steps - version <= limits.max_staleness:
            begun[number] = version
            number += 1
        for done in [group for group in begun if rng.random() < 0.3]:
            finished[done] = begun.pop(done)
        chosen = choose_groups(finished, list(begun.values()), step, limits)
        if chosen is None:
            assert begun or version < step
            continue
        assert len(chosen) == groups
        for group in chosen:
            del finished[group]
        step += steps
        assert min([*begun.values(), *finished.values()], default=step) >= step - limits.max_staleness
    assert step >= 20 * steps


def test_training_waits_for_more_old_groups_than_one_batch_can_take() -> None:
    limits = StreamLimits(2, 1, 2, 1000)
    # At step 3, groups of version 2 can wait for one batch: 2 of them find a place there, 3 do not.
    finished = {10: 3, 11: 3}
    assert choose_groups(finished, [2, 2], 3, limits) == [10, 11]
    assert choose_groups(finished, [2, 2, 2], 3, limits) is None
    assert choose_groups(finished | {12: 2}, [2, 2], 3, limits) == [12, 10]
