"""Plans the rows of a mini-batch: which rank computes which rows, and the tree plan of this rank's share."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from megatron_dta.core.config import TreeConfig
from megatron_dta.core.engine import StepPart, TreeBatch, TreeEngine, prepare_batch
from megatron_dta.core.objectives.weights import count_trained
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.integrations.rows import Row
from megatron_dta.training.autotune import Autotuner
from megatron_dta.training.data.division import partition_samples

# Trainers compute old logprobs of a batch and then train on it: the plan of one serves the other.
KEPT_PLANS = 4


@dataclass(frozen=True)
class RowPlan:
    """The plan of a mini-batch's rows.

    Attributes:
        rows: the rows of all data-parallel ranks, in rank order.
        begin: number of this rank's first row among them; ``count`` rows are this rank's.
        computed: numbers of the rows that this rank computes, in the order of the batch's sequences.
        batch: the tree plan of these rows.
    """

    rows: list[Row]
    begin: int
    count: int
    computed: list[int]
    batch: TreeBatch

    def to_owners(self, values: Sequence[np.ndarray], engine: TreeEngine) -> list[np.ndarray]:
        """Distribute arrays [T] of the computed rows to the ranks that brought the rows; 0 for rows nobody computes."""
        by_row: dict[int, np.ndarray] = {}
        for part in engine.mesh.gather_over_data(dict(zip(self.computed, values, strict=True))):
            by_row |= part
        numbers = range(self.begin, self.begin + self.count)
        # The accumulation precision of the model, in which the engine returns its outputs.
        dtype = np.float64 if engine.dtype == torch.float64 else np.float32
        return [by_row[i] if i in by_row else np.zeros(len(self.rows[i].token_ids), dtype) for i in numbers]


class Planner:
    """Plans mini-batches and keeps the last plans. Every data-parallel rank calls it for the same mini-batches.

    Args:
        tuner: decides the memory of the engine where ``tree`` does not.
    """

    def __init__(self, engine: TreeEngine, tree: TreeConfig, tuner: Autotuner | None = None) -> None:
        self._engine, self._tree, self._tuner = engine, tree, tuner
        self._kept: OrderedDict[bytes, tuple[list[int], TreeBatch]] = OrderedDict()

    def plan(self, rank_rows: Sequence[Row]) -> RowPlan:
        """The plan of ``rank_rows`` and the other ranks' rows.

        Rows are planned in an order that depends on their contents only. Passes over the same rows in another order or
        division therefore use the same plan.
        """
        mesh = self._engine.mesh
        if self._tuner is not None and self._tuner.update():
            self._kept.clear()
        parts = mesh.gather_over_data(list(rank_rows))
        rows = [row for part in parts for row in part]
        begin = sum(len(part) for part in parts[: mesh.data_rank])
        order = sorted((i for i, row in enumerate(rows) if row.loss_mask.any()), key=lambda i: rows[i].order)
        digest = hashlib.blake2b()
        for i in order:
            for content in rows[i].order:
                digest.update(len(content).to_bytes(8, "big") + content)
        positions, batch = self._planned(digest.digest(), [rows[i] for i in order])
        return RowPlan(rows, begin, len(rank_rows), [order[position] for position in positions], batch)

    def _planned(self, digest: bytes, rows: Sequence[Row]) -> tuple[list[int], TreeBatch]:
        if digest not in self._kept:
            self._kept[digest] = self._make(rows)
            if len(self._kept) > KEPT_PLANS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(digest)
        return self._kept[digest]

    def _make(self, rows: Sequence[Row]) -> tuple[list[int], TreeBatch]:
        engine, mesh = self._engine, self._engine.mesh
        samples = [TrainingSample(row.token_ids, row.loss_mask) for row in rows]
        numbers = list(range(len(samples)))
        if mesh.data_size > 1 and samples:
            numbers = partition_samples(samples, engine, self._tree).sequences_of(mesh.data_rank).tolist()
        counts = count_trained(np.array([sample.num_trained for sample in samples], np.int64))
        batch = prepare_batch(
            [samples[i] for i in numbers],
            self._tree,
            pipeline=engine.pipeline(self._tree.tree_segment_tokens),
            part=StepPart(counts, numbers),
        )
        # The trainer's loss function weights the tokens itself.
        return numbers, replace(batch, loss_weights=np.ones(batch.plan.num_pairs))
