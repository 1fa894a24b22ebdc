"""Compares the pools of a step on a rank with the bytes that its plan has counted."""

import contextlib
from typing import Any
from unittest import mock

from megatron_dta.core.engine.stage_run import StageRun
from megatron_dta.core.planning.step.passes import stage_chunks


@contextlib.contextmanager
def noting_pools(engine: Any, batch: Any, noted_pools: list[tuple[float, int]]) -> Any:
    """Note the pools of each model chunk in a step of limited memory: counted bytes, and those of their tensors."""
    walk = StageRun.walk

    def noted(run: StageRun) -> None:
        shape, stage = engine.pipeline(None), engine.mesh.pipeline_rank
        chunks = stage_chunks(batch.plan.segments, run.pass_plan, shape, stage)
        for number, (chunk, keys) in enumerate(zip(chunks, run.pools, strict=True)):
            tensors = [keys.keys_LSGD, keys.values_LSGD, keys.grad_keys_LSGD, keys.grad_values_LSGD]
            if run.states:
                pool = run.states[number].pool
                tensors += [pool.states, pool.rows, pool.grad_states, pool.grad_rows]
            noted_pools.append((chunk.pool_bytes, sum(tensor.nbytes for tensor in tensors)))
        walk(run)

    with mock.patch.object(StageRun, "walk", noted) if engine.memory is not None else contextlib.nullcontext():
        yield
