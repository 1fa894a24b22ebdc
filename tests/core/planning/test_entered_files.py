"""Planning for one rank enters few files, so that it is read in an hour; the others serve meshes and limits."""

import sys
from pathlib import Path

import numpy as np
import pytest

import megatron_dta
from megatron_dta.core.planning.plan_step import plan_step
from megatron_dta.core.planning.step.passes import StepBudget
from megatron_dta.core.planning.step.sample import TrainingSample
from tree_engine_cases import branching_sequences

PACKAGE = Path(megatron_dta.__file__).parent
MOST_FILES = 8


@pytest.mark.parametrize("segment_tokens", [None, 7])
def test_a_plan_for_one_rank_enters_few_files(segment_tokens: int | None) -> None:
    sequences = branching_sequences(np.random.default_rng(0), count=9, longest=40)
    samples = [TrainingSample(tokens, np.arange(len(tokens)) > 0) for tokens in sequences]
    entered = set()
    sys.setprofile(lambda frame, event, argument: entered.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        plan = plan_step(samples, budget=StepBudget(segment_tokens))
    finally:
        sys.setprofile(None)
    assert plan.segments.num_segments > 3 * (segment_tokens is not None)
    files = sorted(str(Path(name).relative_to(PACKAGE)) for name in entered if name.startswith(str(PACKAGE)))
    assert "core/planning/plan_step.py" in files
    assert len(files) <= MOST_FILES, files
