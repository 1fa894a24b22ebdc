"""Builds the teachers of a run: in this process, or connected to others."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_dta.common.http.session import Limits
from megatron_dta.core.engine import TreeEngine
from megatron_dta.core.model.build import build_model
from megatron_dta.extras.teachers.remote import RemoteTeacher
from megatron_dta.training.config import TrainConfig
from megatron_dta.training.config.distillation import is_address
from megatron_dta.training.huggingface.save import load_hf
from megatron_dta.training.teachers import ScoringTeacher, Teacher, Teachers, teacher_folders, teacher_shape


def build_teachers(
    config: TrainConfig, device: torch.device, policy: TreeEngine, make_engine: object
) -> Teachers | None:
    """The teachers of ``--teacher-load-hf``, with their weights or connected; None without any.

    Args:
        policy: the policy's engine.
        make_engine: the engine of a model.
    """
    settings = config.distillation
    if not settings.is_used:
        return None
    teachers: dict[str, ScoringTeacher] = {}
    for name, folder in teacher_folders(settings.teacher_load_hf or []).items():
        if is_address(folder):
            limits = Limits(config.sampling.rollout_timeout, attempts=config.sampling.rollout_attempts)
            teachers[name] = RemoteTeacher(folder, policy, settings.teacher_kl == "full-vocabulary", limits)
            continue
        shape = teacher_shape(config, folder)
        model = build_model(shape, device, config.parallel)
        checkpoint = replace(config.checkpoint, load_hf=folder, hf_checkpoint=folder)
        load_hf(replace(config, model=shape, checkpoint=checkpoint), model)
        model.requires_grad_(False).eval()
        teachers[name] = Teacher(make_engine(model), config.tree, config.objective.offload_reference)
    return Teachers(settings, teachers)
