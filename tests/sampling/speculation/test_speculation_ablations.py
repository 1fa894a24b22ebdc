"""Variants that replays compare: the trees to draft from, and a window that follows the size of updates."""

from __future__ import annotations

import numpy as np
import pytest

from conftest import seed_all
from megatron_dta.sampling.speculation.drafter import Drafter, DrafterParams, window_by_updates


def told(drafter: Drafter, problem: str, prompt: np.ndarray, tokens: np.ndarray) -> int:
    sample = drafter.open(problem, prompt)
    drafter.extend(np.array([sample], np.uint32), tokens.astype(np.int32), np.array([0, len(tokens)]))
    return sample


@pytest.mark.parametrize("scope", ["problem", "global", "both"])
def test_the_scope_chooses_the_trees(scope: str) -> None:
    rng = seed_all(5)
    drafter = Drafter(DrafterParams(depth=12, scope=scope))
    empty = drafter._forest.num_nodes
    phrase, own = rng.permutation(1000)[:30], rng.permutation(1000)[:30] + 1000
    drafter.finish(told(drafter, "one", np.array([5000]), phrase), 0)
    drafter.finish(told(drafter, "two", np.array([5001]), own), 0)
    restored = Drafter(drafter.params)
    restored.load_state_dict(drafter.state_dict())
    for each in (drafter, restored):
        found = {}
        for name, text in (("other", phrase), ("own", own)):
            new = told(each, "two", np.array([5002]), text[:10])
            drafts = each.draft(np.array([new]), np.array([4]))
            found[name] = drafts.tokens[0, : drafts.lengths[0]].tolist() == text[10:14].tolist()
            each.discard(new)
        assert found == {"other": scope != "problem", "own": True}
    drafter.end_step(99)
    assert (len(drafter._samples), drafter.stored_tokens, drafter._forest.num_nodes) == (0, 0, empty)
    with pytest.raises(ValueError, match="scope must be one of"):
        DrafterParams(scope="all")


def test_larger_updates_shorten_the_window() -> None:
    assert [window_by_updates([0.1] * count, 3) for count in (1, 2, 3, 4, 9)] == [1, 2, 3, 3, 3]
    assert window_by_updates([1, 1, 1, 1, 1, 7], 3) == 1
    assert window_by_updates([4, 4, 4, 4, 1, 1], 3) == 3
    assert window_by_updates([4, 4, 1, 1, 1, 1], 3) == 4
    drafter = Drafter(DrafterParams(window=1))
    for step, window in enumerate((2, 2, 3, 1, 2)):
        drafter.finish(told(drafter, "a", np.array([1]), np.arange(9)), step)
        drafter.end_step(step, window)
        kept = [entry.step for entry in drafter._samples.values()]
        assert kept == [[0], [0, 1], [0, 1, 2], [3], [3, 4]][step]
