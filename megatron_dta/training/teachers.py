"""Teachers of on-policy distillation: frozen models that score the policy's own rollouts.

A teacher has a shape and a checkpoint of its own and the policy's vocabulary. It is in this process, on the policy's
mesh, or served by ``megatron-dta teacher`` from other processes with a mesh of their own (``teachers.remote``). It
computes the prefix tree of its samples in one forward-only pass, planned for its own shape.

    full-vocabulary   hidden states of the teacher at every row go to the host; in the training pass its logits are
                      computed from them along with the policy's, chunk by chunk (``teacher_pass``). This happens
                      right before a step is trained, so checkpoints hold nothing of it.
    sampled-tokens    logprobs of the sampled tokens; coef * (log q - log p) is added to the advantage of each token.
                      This is the gradient of the reverse KL divergence on samples of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from megatron_dta.common.http.session import http_parts
from megatron_dta.core.common.errors import InputError
from megatron_dta.core.config import ModelConfig, TreeConfig
from megatron_dta.core.engine import TreeBatch, TreeEngine, prepare_batch
from megatron_dta.core.model.kernel_types import Head
from megatron_dta.core.planning.step.sample import TrainingSample
from megatron_dta.core.rollouts.record import Rollout
from megatron_dta.training.config import DistillationConfig, TrainConfig
from megatron_dta.training.config.distillation import is_address
from megatron_dta.training.huggingface.config.config import settings_from_hf
from megatron_dta.training.teacher_pass import TeacherPass, TeacherTarget
from megatron_dta.training.weights.offload import HostStorages

# Settings of the policy that its teachers share; everything else follows from their config.json.
_SHARED = (
    "bf16",
    "params_dtype",
    "make_vocab_size_divisible_by",
    "enable_fp32_lm_head",
    "fused_layer_impl",
    "transformer_impl",
)


def teacher_folders(settings: Sequence[str]) -> dict[str, str]:
    """Name -> folder of ``--teacher-load-hf``; a folder without a name has its own as name. ``InputError`` if a name
    occurs twice.
    """
    folders: dict[str, str] = {}
    for entry in settings:
        name, separator, folder = ("", "", entry) if is_address(entry) else entry.partition("=")
        folder = folder if separator or is_address(entry) else name
        name = name if separator else Path(folder).name
        if not name or not folder or name in folders:
            raise InputError(f"--teacher-load-hf {entry}: give NAME=FOLDER, each name once")
        if is_address(folder) and http_parts(folder) is None:
            raise InputError(f"--teacher-load-hf {entry}: the address must be like http://HOST:PORT")
        folders[name] = folder
    return folders


def teacher_shape(config: TrainConfig, folder: str) -> ModelConfig:
    """The shape of the teacher in ``folder``; ``InputError`` if its vocabulary is not the policy's."""
    shared = {name: getattr(config.model, name) for name in _SHARED}
    settings = settings_from_hf(folder, {})
    if settings.get("vocab_size") != config.model.vocab_size:
        raise InputError(
            f"--teacher-load-hf {folder}: has a vocabulary of {settings.get('vocab_size')} and the policy of "
            f"{config.model.vocab_size}; the divergence needs the same tokens"
        )
    return ModelConfig(**{**settings, **shared})


class Teacher:
    """A teacher in this process, on the policy's mesh.

    Args:
        engine: on its frozen model.
        tree: how its passes are planned.
        offload: keep the weights on the host between passes, except for the output weight.
    """

    def __init__(self, engine: TreeEngine, tree: TreeConfig, offload: bool = False) -> None:
        self.engine, self._tree, self._storages = engine, tree, None
        if offload:
            chunks = engine.tree_models
            kept = {id(chunks[-1]._padded_output_weight())} if chunks[-1].post_process else set()
            parameters = [p for chunk in chunks for p in chunk.parameters() if id(p) not in kept]
            for parameter in parameters:
                # NumPy has seen the storage (on a CPU), which cannot be emptied then.
                if not parameter.untyped_storage().resizable():
                    parameter.data = parameter.data.clone()
            self._storages = HostStorages(parameters, constant=True)
            self._storages.to_host()

    @property
    def models(self) -> list[torch.nn.Module]:
        """Chunks of the model in this process."""
        return self.engine.tree_models

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """Logprobs of each sample's trained tokens, [T] each, 0 elsewhere."""
        with self._on_device():
            return self.engine.compute_logprobs(teacher_batch(self.engine, samples, self._tree))

    def rows(self, samples: Sequence[TrainingSample]) -> tuple[np.ndarray, torch.Tensor | None]:
        """The row of each trained token, int64 [P], and the rows' hidden states; None before the last stage."""
        with self._on_device():
            batch = teacher_batch(self.engine, samples, self._tree)
            return rows_of_pairs(batch), self.engine.compute_row_states(batch)

    def head(self) -> Head | None:
        """This rank's rows of the output weight; None before the last stage."""
        last = self.engine.tree_models[-1]
        return last.head() if last.post_process else None

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        if self._storages is not None:
            self._storages.to_device()
        try:
            yield
        finally:
            if self._storages is not None:
                self._storages.to_host()


class ScoringTeacher(Protocol):
    """A teacher in this process or elsewhere; the methods are those of ``Teacher``."""

    models: list[torch.nn.Module]

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]: ...

    def rows(self, samples: Sequence[TrainingSample]) -> tuple[np.ndarray, torch.Tensor | None]: ...

    def head(self) -> Head | None: ...


class Teachers:
    """All teachers of a run.

    Args:
        teachers: by name, the default one first.
    """

    def __init__(self, settings: DistillationConfig, teachers: dict[str, ScoringTeacher]) -> None:
        self._settings = settings
        self._names, self._teachers = list(teachers), list(teachers.values())
        self.models = [chunk for teacher in self._teachers for chunk in teacher.models]

    def numbers(self, rollouts: Sequence[Rollout]) -> list[int]:
        """The teacher of each rollout; ``InputError`` for an unknown name."""
        for i, rollout in enumerate(rollouts):
            if rollout.teacher is not None and rollout.teacher not in self._names:
                raise InputError(
                    f"rollout {i + 1}: its teacher '{rollout.teacher}' is not one of --teacher-load-hf: "
                    f"{', '.join(self._names)}"
                )
        return [0 if r.teacher is None else self._names.index(r.teacher) for r in rollouts]

    def logprobs(self, samples: Sequence[TrainingSample]) -> list[np.ndarray]:
        """The logprobs of each sample's trained tokens under its teacher, [T] each, 0 elsewhere."""
        logprobs: list[np.ndarray] = [np.zeros(0)] * len(samples)
        for number, indices in self._shares(samples):
            computed = self._teachers[number].logprobs([samples[i] for i in indices])
            for i, values in zip(indices, computed, strict=True):
                logprobs[i] = values
        return logprobs

    def attach(self, batch: TreeBatch, samples: Sequence[TrainingSample]) -> TreeBatch:
        """The batch with the divergences of ``--teacher-kl full-vocabulary`` in its loss; ``samples`` are the batch's,
        in order. Every rank calls this.
        """
        if self._settings.teacher_kl != "full-vocabulary" or batch.teachers:
            return batch
        targets = []
        for number, indices in self._shares(samples):
            teacher = self._teachers[number]
            row_there, states = teacher.rows([samples[i] for i in indices])
            target = _target(batch, indices, row_there, self._settings.teacher_coef)
            if states is not None:
                target = replace(target, states=states[torch.from_numpy(target.rows_there)], head=teacher.head())
            targets.append(target)
        return replace(batch, teachers=partial(TeacherPass, targets) if targets else None)

    def _shares(self, samples: Sequence[TrainingSample]) -> list[tuple[int, list[int]]]:
        """The samples of each teacher; teachers without samples on this rank have an empty share, so that all ranks
        make the same passes.
        """
        return [
            (number, [i for i, sample in enumerate(samples) if sample.teacher == number])
            for number in range(len(self._teachers))
        ]


def _target(batch: TreeBatch, indices: list[int], row_there: np.ndarray, coefficient: float) -> TeacherTarget:
    """The rows of the policy's plan that a teacher scores, without its states.

    Args:
        indices: the samples of the teacher.
        row_there: its row of each of their trained tokens, in the order of the samples.
    """
    plan = batch.plan
    spans = [np.arange(plan.sequence_pairs[i], plan.sequence_pairs[i + 1]) for i in indices]
    pairs = np.concatenate([np.zeros(0, np.int64), *spans])
    rows, first, row_index = np.unique(plan.edge_row[plan.pair_edge[pairs]], return_index=True, return_inverse=True)
    weights = np.bincount(row_index, batch.loss_weights[pairs], len(rows)) * coefficient
    numbers = np.bincount(row_index, minlength=len(rows))
    return TeacherTarget(rows.astype(np.int64), weights, numbers, row_there[first])


def teacher_batch(engine: TreeEngine, samples: Sequence[TrainingSample], tree: TreeConfig) -> TreeBatch:
    """The plan of a teacher for ``samples``; ranks that share a model must all call this."""
    plain = [TrainingSample(sample.token_ids, sample.loss_mask) for sample in samples]
    return prepare_batch(plain, replace(tree, tree_memory_gib=None), pipeline=engine.pipeline(tree.tree_segment_tokens))


def rows_of_pairs(batch: TreeBatch) -> np.ndarray:
    """int64 [P]: the row of each (sample, trained token), in the order of the samples."""
    return batch.plan.edge_row[batch.plan.pair_edge].astype(np.int64)
